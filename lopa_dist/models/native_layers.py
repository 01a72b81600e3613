"""All layers of a model in one call to C, if C has all of their operations.

`FusedTransformer` makes about ten calls per layer, to torch's operations and ours. With few rows these calls take
longer than the arithmetic. Here C makes them, with the same operations in the same order, so the bits are the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lopa_dist.kernels import native
from lopa_dist.kernels.dispatch import in_c
from lopa_dist.models.fused import Cache, FusedTransformer
from lopa_dist.models.mask_rows import adapter_of
from lopa_dist.ragged import Ints


class NativeLayers:
    """The layers of a network that C computes as a whole.

    Args:
        network: one that `suits` accepts.
        rotations: cosines and sines ``[longest, 1, D]`` of all positions.
    """

    def __init__(self, network: FusedTransformer, rotations: tuple[Tensor, Tensor]) -> None:
        self.network, self.rotations = network, rotations
        self.projections: list[Any] = [linear for layer in network.layers for linear in layer.projections]
        dim, first = network.config.head_dim, network.layers[0]
        kv_heads = network.config.kv_heads
        heads = len(first.qkv.weight) // dim - 2 * kv_heads  # type: ignore[arg-type]
        intermediate = len(first.gate_up.weight) // 2  # type: ignore[arg-type]
        eps = network.config.rms_eps
        self.shape = native.Shape(network.config.hidden_size, heads, kv_heads, dim, intermediate, eps)
        numbers = range(len(network.layers))
        self.weights: Ints = np.array([weights_of(network, number) for number in numbers], np.int64)
        self.pairs: Ints | None = None  # of an adapter for rows that draft
        if network.mask_rows is not None:
            self.pairs = np.array([pairs_of(network, number) for number in numbers], np.int64)
            inputs = [linear.weight.shape[1] for linear in self.projections]
            self.widest = max(inputs) + int(self.pairs[..., 2:].sum(-1).max())

    @staticmethod
    def suits(network: FusedTransformer, rotations: tuple[Tensor, Tensor]) -> bool:
        """Return whether C can run a network's layers: no experts, eight-bit weights or scaled queries."""
        weight = network.embedding
        if network.needs_tiles or network.config.query_scaling is not None:
            return False
        projections: list[Any] = [linear for layer in network.layers for linear in layer.projections]
        tensors = [weight, *network.norms, *rotations]
        matrices = []  # of products
        for linear in projections:
            if not isinstance(linear, nn.Linear):
                return False
            matrices.append(linear.weight)
            if (adapter := adapter_of(linear)) is not None:
                matrices += [matrix for _, pair in adapter.parts if pair is not None for matrix in pair]
            tensors += [] if linear.bias is None else [linear.bias]
        tensors += matrices
        if not all(matrix.t().is_contiguous() for matrix in matrices):
            return False
        even = all(matrix.shape[1] % 2 == 0 for matrix in matrices)
        by_row_or_column = weight.is_contiguous() or weight.t().is_contiguous()
        return in_c(weight, *tensors) and (even or weight.dtype == torch.float32) and by_row_or_column

    def runs(self, cache: Cache) -> bool:
        """Return whether C computes this forward.

        No projection may have hooks but those of an adapter for rows that draft. No K/V must be kept finite.
        """
        hooked = any(
            len(linear._forward_hooks) > (adapter_of(linear) is not None) or linear._forward_pre_hooks
            for linear in self.projections
        )
        return not hooked and cache.must_be_finite is None and in_c(self.network.embedding, cache.keys)

    def __call__(
        self, tokens: Tensor, positions: Tensor, cache: Cache, sees: native.Plan, wanted: Tensor | None = None
    ) -> Tensor:
        """Return what the network returns, with attention in C; `sees` is what the rows see."""
        return native.layers(
            self.weights, self.shape, self.network.embedding, self.network.norms[-1], tokens, positions,
            self.rotations, cache.keys, cache.values, cache.scratch, cache.slots, sees, wanted,
            self.adapter(tokens, cache),
        )  # fmt: skip

    def adapter(self, tokens: Tensor, cache: Cache) -> native.Adapter | None:
        """Return the adapter for the rows that draft; None if there is none, or if no row drafts."""
        masks = self.network.mask_rows
        if masks is None or self.pairs is None or masks.resting:
            return None
        drafts = self.network.drafting(tokens, cache)
        return native.Adapter(self.pairs, self.widest, drafts) if drafts.any() else None


def weights_of(network: FusedTransformer, number: int) -> list[int]:
    """Return the addresses of a layer's weights, in the order of `Layer` in `native.c`."""
    layer = network.layers[number]
    q_norm, k_norm = layer.head_norms or (None, None)

    def of(linear: Any) -> tuple[Tensor, Tensor | None]:
        return linear.weight, linear.bias

    order = (
        layer.before, *of(layer.qkv), q_norm, k_norm, *of(layer.out), layer.after, *of(layer.gate_up), *of(layer.down),
    )  # fmt: skip
    return [native.pointer(tensor) or 0 for tensor in order]


def pairs_of(network: FusedTransformer, number: int) -> list[list[int]]:
    """Return a layer's pairs for q, k, v, out, gate, up and down, each with the fields of `Pair` in `native.c`."""
    layer, pairs = network.layers[number], []
    for linear, count in ((layer.qkv, 3), (layer.out, 1), (layer.gate_up, 2), (layer.down, 1)):
        adapter = adapter_of(linear)
        for outputs, pair in [(0, None)] * count if adapter is None else adapter.parts:
            a, b = (0, 0) if pair is None else (matrix.data_ptr() for matrix in pair)
            pairs.append([a, b, 0 if pair is None else len(pair[0]), outputs])
    return pairs
