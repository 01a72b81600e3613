"""Which runner serves a model on its device: CUDA graphs if they can be used, else the eager path."""

from __future__ import annotations

from collections.abc import Collection
from weakref import WeakKeyDictionary

import torch

from lopa_dist.decode.config import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.kernel_choice import plain_kernels, without_graphs
from lopa_dist.engine.kv_pool import KVPool
from lopa_dist.engine.memory import MOST_ROWS, release_cached
from lopa_dist.engine.runner import Runner, Running
from lopa_dist.engine.sizes import longest_sequence, tile_rows, usual_forward, usual_predictions
from lopa_dist.engine.static_runner import StaticRunner, StepSizes
from lopa_dist.kernels.attention import Meta, make, suited
from lopa_dist.kernels.dispatch import suits_c, sum_in_fp32
from lopa_dist.kernels.native import NAMES, warn_of_fault
from lopa_dist.kernels.row_bits import warn_of_bits
from lopa_dist.kernels.sampling import Sampling
from lopa_dist.models.fused import FusedTransformer
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Communicator, Solo
from lopa_dist.ragged import padded
from lopa_dist.rows.share import ALONE, Share
from lopa_dist.rules import rule_for

FUSED: WeakKeyDictionary[Transformer, FusedTransformer] = WeakKeyDictionary()
"""Models whose projections are merged: once for all engines that use the model."""


def fused_form_of(model: Transformer) -> FusedTransformer:
    """Return the model's fused form, with the adapter that it has now, and the weights as they are now."""
    if model in FUSED and FUSED[model].adapters != model.adapters:
        FUSED[model].take_adapter(model)
    if model not in FUSED:
        device = model.head_weight.device
        release_cached(device)
        FUSED[model] = FusedTransformer(model)
        release_cached(device)  # the old weights' memory is in pieces that nothing else fits into
    for layer in FUSED[model].layers:
        if layer.experts is not None:
            layer.experts.gate.renew()
    return FUSED[model]


def wants_graphs(graphs: str, meta: bool, device: torch.device, tensor: int) -> bool:
    """Return whether forwards run over fixed buffers if every kernel can be used.

    Args:
        graphs: `engine.graphs`.
        meta: whether meta-attention attends.
        device: of the model.
        tensor: ranks that share it.
    """
    return meta and tensor == 1 and (graphs == "always" or (graphs == "auto" and device.type == "cuda"))


def check_reproducible(experts: bool, plain: Collection[str], static: bool) -> None:
    """Raise a ValueError if a GPU cannot give a row the same bits in every batch (`engine.reproducible`).

    Args:
        experts: whether the model is a mixture of experts.
        plain: operations that torch runs, not Triton.
        static: whether forwards run over fixed buffers.
    """
    if experts:
        raise ValueError(
            "engine.reproducible=true is not possible for a mixture of experts on a GPU: a library computes the "
            "router (and in bf16 the experts), and the bits may depend on the batch"
        )
    if plain:
        raise ValueError(
            "engine.reproducible=true on a GPU needs all of Triton's kernels, since torch's forms may give a row "
            f"other bits in another batch; these run in torch's form: {', '.join(sorted(plain))}"
        )
    if not static:
        raise ValueError(
            "engine.reproducible=true on a GPU needs engine.attention=meta, engine.graphs=auto, Triton's kernels "
            "(engine.kernels), parallel.tensor=1"
        )


class Runners:
    """Makes runners for one model and one way of decoding.

    Args:
        model, config: of the engine.
        options: `attention`, `kernels`, `graphs`, `reproducible` and `max_rows` are read.
        tensor: the group that the model is split over.
        share: the branches that run on this rank.

    Raises:
        ValueError: graphs=always, but graphs cannot be used; reproducible on a GPU without graphs; or a kernel cannot
            be used (`plain_kernels`).
    """

    def __init__(
        self,
        model: Transformer,
        config: DecodeConfig,
        options: EngineConfig,
        tensor: Communicator | None = None,
        share: Share = ALONE,
    ) -> None:
        self.branches = share.at_once(config.max_branches)  # of a sequence on one rank, at most
        self.rows = rule_for(config).rows
        self.model, self.config, self.options = model, config, options
        self.tensor = tensor = tensor or Solo()
        attention, graphs, reproducible = options.attention, options.graphs, options.reproducible
        device, shape = model.head_weight.device, model.config
        sum_in_fp32()
        name = suited(device, shape.head_dim, options.kernels) if attention == "auto" else attention
        heads, kv_heads = shape.heads // tensor.size, shape.kv_heads // tensor.size
        rows = tile_rows(config, self.branches, heads // kv_heads, reproducible) if name == "meta" else 1
        in_c = options.kernels != "torch" and suits_c(model.head_weight)
        form = heads, kv_heads, shape.head_dim, rows, model.head_weight, self.rows.in_place, in_c
        self.attention = make(name, *form)
        of_tile = self.attention.tile_rows if isinstance(self.attention, Meta) else None
        self.network = fused_form_of(model)  # before anyone asks how much memory is free
        if device.type == "cpu" and (not in_c or self.network.needs_tiles):
            warn_of_bits(model.head_weight.dtype)
        if device.type == "cpu" and model.head_weight.dtype in NAMES.values() and options.kernels != "torch":
            warn_of_fault(model.head_weight.dtype)
        self.plain = plain_kernels(model, options, device, of_tile, tensor.size, self.rows.in_place)
        if "attention" in self.plain and name == "meta" and device.type == "cuda":
            self.attention = make("torch", *form)
        wanted = wants_graphs(graphs, isinstance(self.attention, Meta), device, tensor.size)
        self.static = wanted and not without_graphs(model, self.plain, device)
        if graphs == "always" and not self.static:
            raise ValueError(
                "engine.graphs=always: graphs need engine.attention=meta, Triton's kernels (engine.kernels) and "
                "parallel.tensor=1"
            )
        if reproducible and device.type == "cuda":
            check_reproducible(shape.experts is not None, self.plain, self.static)

    def make(
        self, pool: KVPool, sampling: Sampling, sequences: int, longest_prompt: int, scratch: int | None = None
    ) -> Runner:
        """Return a runner over `pool`.

        Args:
            pool: gets its scratch now, if the amount is known.
            sampling: how tokens are chosen for requests that do not say.
            sequences: the most that run at once.
            longest_prompt: tokens of the longest prompt.
            scratch: rows that no forward exceeds; None: not known.
        """
        longest = longest_sequence(self.config, longest_prompt)
        virtual_padding = self.static and self.options.reproducible
        network = self.network.with_virtual_padding() if virtual_padding else self.network
        running = Running(
            self.model, network, self.attention, sampling, longest, self.tensor, self.plain, self.config.second_choices
        )
        if not self.static:
            if scratch is not None:
                pool.reserve(padded(scratch), padded(scratch))
            return Runner(running, pool)
        limit = self.options.max_rows or MOST_ROWS
        if scratch is None:
            scratch = usual_forward(self.config, self.branches, sequences, longest, limit)
        predictions = usual_predictions(self.config, self.branches, sequences)
        segments = self.branches + self.rows.groups(self.config)  # of a sequence, without its prompt's
        sizes = StepSizes(sequences, segments, scratch, predictions)
        return StaticRunner(running, pool, sizes, not self.options.reproducible, self.options.graphs == "always")
