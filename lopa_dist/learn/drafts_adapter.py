"""The adapter in training: LoRA on the projections of rows that draft, and the embedding of their mask."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lopa_dist.models.mask_rows import Pair, adapter_of
from lopa_dist.models.tensor_gradients import read_by_all
from lopa_dist.models.tensor_parallel import is_split, part
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Communicator, Solo

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class DraftsAdapter(nn.Module):
    """Pairs A ``[r, in]`` and B ``[out, r]`` in fp32 for each projection of a model's layers, and a mask's embedding.

    It starts from what the model drafts with: its own adapter for masks if it has one, else pairs that change nothing.

    Every rank has all of it, even if the model is split over tensor ranks: each then uses its own rows of B.

    Args:
        model: this rank's part of the model, whose weights stay as they are.
        rank: r, of a new adapter; an adapter that the model has keeps its own, also where it has no pair yet.
        tensor: the group that the model is split over.
    """

    def __init__(self, model: Transformer, rank: int, tensor: Communicator | None = None) -> None:
        super().__init__()
        self.tensor = tensor or Solo()
        self.model = [model]  # in a list, so that its weights are not among this module's
        weight = model.model.embed_tokens.weight
        random = torch.Generator().manual_seed(0)
        self.names: list[str] = []
        self.a, self.b = nn.ParameterList(), nn.ParameterList()
        found = [(name, projection, pair_of(projection)) for name, projection in projections(model)]
        rank = next((len(pair[0]) for _, _, pair in found if pair is not None), rank)
        for name, projection, pair in found:
            split = self.tensor.size if is_split(name) else 1
            if pair is None:
                rows, columns = projection.weight.shape
                a = torch.empty(rank, columns).uniform_(-1, 1, generator=random) / math.sqrt(columns)
                pair = a, torch.zeros(rows * split, rank)
            elif split > 1:
                pair = pair[0], self.tensor.all_gather(pair[1].contiguous()).flatten(0, 1)
            self.names.append(name)
            for own, value in zip((self.a, self.b), pair, strict=True):
                own.append(nn.Parameter(value.detach().float().to(weight.device, copy=True)))
        layers = [int(re.findall(r"\d+", name)[0]) for name in self.names]
        self.of_layer = [[n for n, layer in enumerate(layers) if layer == i] for i in range(model.config.layers)]
        own_mask = model.config.mask_id < len(weight)
        mask = weight[model.config.mask_id] if own_mask else weight.float().mean(0)
        self.mask = nn.Parameter(mask.detach().float().clone())

    @contextmanager
    def attached(self, layer: int) -> Iterator[None]:
        """Apply the adapter to all rows of a layer's projections within the context."""
        model = self.model[0]
        with ExitStack() as stack:
            if model.mask_rows is not None:
                stack.enter_context(model.mask_rows.rest())
            for number in self.of_layer[layer]:
                projection = model.get_submodule(self.names[number])
                assert isinstance(projection, nn.Linear)
                a, b, name = self.a[number], self.b[number], self.names[number]
                of_all = self.tensor if is_split(name) else Solo()
                b = b[part(len(b), of_all)]
                projection.forward = beside(projection, a, b, of_all)  # type: ignore[assignment,method-assign]
                stack.callback(projection.__dict__.pop, "forward")
            yield

    def same_everywhere(self) -> list[nn.Parameter]:
        """Return the parameters whose whole gradient every tensor rank computes; of others, each computes a part."""
        whole = [number for number, name in enumerate(self.names) if not is_split(name)]
        return [self.mask, *(pair[number] for pair in (self.a, self.b) for number in whole)]

    def pairs(self) -> dict[str, Pair]:
        """Return A and B of each projection, by its name."""
        pairs = zip(self.a, self.b, strict=True)
        return {name: (a.detach(), b.detach()) for name, (a, b) in zip(self.names, pairs, strict=True)}


def projections(model: Transformer) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the projections of a model's layers that an adapter changes, with their names."""
    for name, module in model.named_modules():
        if ".layers." in name and name.rpartition(".")[2] in TARGETS and isinstance(module, nn.Linear):
            yield name, module


def more_arithmetic(model: Transformer, rank: int) -> float:
    """Return how much arithmetic an adapter of this rank adds to a row, as a share of what the row takes without it."""
    shapes = [projection.weight.shape for _, projection in projections(model)]
    of_row = sum(rows * columns for rows, columns in shapes) + model.head_weight.numel()
    return rank * sum(rows + columns for rows, columns in shapes) / of_row


def pair_of(projection: nn.Linear) -> Pair | None:
    """Return A and this rank's rows of B of the adapter that a projection has for rows of masks, if it has one."""
    adapter = adapter_of(projection)
    return None if adapter is None else adapter.parts[0][1]


def beside(projection: nn.Linear, a: Tensor, b: Tensor, ranks: Communicator) -> Callable[[Tensor], Tensor]:
    """Return the forward of a projection with A and B beside its weight, for an input that all `ranks` read.

    If the weight is small, ``B A`` is added to it first: in one forward with many rows, that takes fewer operations
    than two narrow products and a sum for each row.
    """
    weight, bias = projection.weight, projection.bias
    if weight.numel() < 3 * len(a) * sum(weight.shape):

        def summed(x: Tensor) -> Tensor:
            x = read_by_all(x, ranks)
            return F.linear(
                x, torch.addmm(weight.to(b.dtype), b, a).to(x.dtype), None if bias is None else bias.to(x.dtype)
            )

        return summed

    def narrow(x: Tensor) -> Tensor:
        x = read_by_all(x, ranks)
        return F.linear(x, weight, bias) + F.linear(F.linear(x, a.to(x.dtype)), b.to(x.dtype))

    return narrow
