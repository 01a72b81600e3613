"""Tensor parallelism: a tensor group's ranks split a model's weights, applied to the plain transformer from outside.

Every split projection is column-wise, even those that are usually row-wise: their inputs are gathered instead of their
outputs being summed. A row-wise projection splits the sum over the inputs, so its rounding differs from one rank's, and
near-ties between tokens or branches may fall differently. With columns, every output is computed by one rank over all
inputs in one order: in fp32 on CPUs the bits equal one rank's, whatever the model's sizes (tests). Where a library
chooses its kernel by the width of the weight (sometimes in bf16 on CPUs; GPUs, where it is untried), the last bit may
still differ.

A layer gathers three times: the heads' outputs, the feed-forward's hidden rows, and its outputs. That is
``heads x head_dim + intermediate_size + hidden_size`` numbers per row, 1.8 times what two ring all-reduces move for
Dream-7B. `o_proj` stays whole, 5 % of a layer's weights: splitting it would cost a fourth gather and save less. The
embedding stays whole, too. The head is split by vocabulary (`kernels.record_head`).

Experts are split in the same way: each rank has its columns of all of them. A layer then gathers ``k`` experts' hidden
rows and one output for each row, ``k x expert size + hidden_size`` numbers: 8,192 in Qwen3-30B-A3B. Distributing whole
experts would take ``k x hidden_size``, there 16,384, unless ranks summed their experts' outputs in another order than
one rank does. And all ranks would wait for the one whose experts are chosen most.

The plan below reads like one for `torch.distributed.tensor.parallel`, whose styles compute the same. They are not used:
two linears with a gather each took 6.1 ms as ColwiseParallel and 1.4 ms as here (192 wide, 2 CPU ranks, eager), because
DTensor's dispatch costs more than such a step's arithmetic; and DTensor does not support MPI.
"""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatch

from torch import Tensor, nn

from lopa_dist.kernels.record_head import SHARES, Shard
from lopa_dist.models.config import ModelConfig
from lopa_dist.models.experts import SparseMLP
from lopa_dist.models.tensor_gradients import gathered
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Communicator

COLUMNS = ("*.q_proj", "*.k_proj", "*.v_proj", "*.gate_proj", "*.up_proj", "*.down_proj", "lm_head")
"""Modules of which every rank has a part of the outputs: rows of the weight and of the bias."""
GATHERED_INPUTS = ("*.o_proj", "*.down_proj")
"""Modules that need all inputs, of which every rank has a part."""
GATHERED_OUTPUTS = ("*.down_proj",)
"""Modules whose whole output every rank needs."""


def check(config: ModelConfig, ranks: int) -> None:
    """Raise a ValueError that names the sizes that the number of tensor ranks does not divide, if there are any."""
    if ranks == 1:
        return
    sizes = {
        "heads": config.heads,
        "K/V heads": config.kv_heads,
        "hidden size": config.hidden_size,
        "intermediate size": config.intermediate_size,
    }
    if config.experts is not None:
        sizes["experts' size"] = config.experts.size
        if not config.experts.dense_layers:
            del sizes["intermediate size"]
    uneven = [f"{size} {name}" for name, size in sizes.items() if size % ranks]
    if uneven:
        raise ValueError(f"parallel.tensor={ranks} does not divide the model's {' and '.join(uneven)}")
    if SHARES % ranks or config.vocab_size % SHARES:
        raise ValueError(
            f"parallel.tensor={ranks}: the vocabulary is divided into {SHARES} equal parts, so the number of tensor "
            f"ranks must divide {SHARES}, and {SHARES} must divide the vocabulary of {config.vocab_size}"
        )


def with_own_kv_heads(config: ModelConfig, ranks: int) -> ModelConfig:
    """Return a model's configuration with the K/V heads that each of the ranks that share it has."""
    return replace(config, kv_heads=config.kv_heads // ranks)


def rows(name: str, count: int, comm: Communicator) -> slice:
    """Return which of the parameter `name`'s `count` rows this rank has."""
    return part(count, comm) if is_split(name.rpartition(".")[0]) else slice(0, count)


def is_split(module: str) -> bool:
    """Return whether the module of this name has part of its outputs on each rank."""
    return matches(module, COLUMNS)


def part(count: int, comm: Communicator) -> slice:
    """Return this rank's equal share of `count`."""
    share = count // comm.size
    return slice(comm.rank * share, (comm.rank + 1) * share)


def split(model: Transformer, comm: Communicator) -> None:
    """Keep only this rank's rows of the parameters, and gather between modules; in place, and after `check`."""
    check(model.config, comm.size)
    if comm.size == 1:
        return

    def gather(x: Tensor) -> Tensor:
        """Return every rank's ``[..., part]`` as ``[..., whole]``."""
        return gathered(x, comm)

    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(name, recurse=False):
            own = rows(key, len(parameter), comm)
            if own != slice(0, len(parameter)):
                setattr(module, key.rpartition(".")[2], nn.Parameter(parameter[own], requires_grad=False))
        if isinstance(module, SparseMLP):
            module.split(part(module.experts.size, comm), part(model.config.hidden_size, comm), gather)
        if matches(name, GATHERED_INPUTS):
            module.register_forward_pre_hook(lambda module, inputs: gather(inputs[0]))
        if matches(name, GATHERED_OUTPUTS):
            module.register_forward_hook(lambda module, inputs, output: gather(output))


def head_shard(comm: Communicator) -> Shard:
    """Return this rank's part of the head's vocabulary."""
    return Shard(comm.rank, comm.size, comm.all_gather)


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a module's name matches one of these patterns."""
    return any(fnmatch(name, pattern) for pattern in patterns)
