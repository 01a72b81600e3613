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
        self.weights: Ints = np.array([weights_of(network, number) for number in range(len(network.layers))], np.int64)

    @staticmethod
    def suits(network: FusedTransformer, rotations: tuple[Tensor, Tensor]) -> bool:
        """Return whether C can run a network's layers: no experts, eight-bit weights or scaled queries."""
        weight = network.embedding
        if network.needs_tiles or network.config.query_scaling is not None:
            return False
        projections: list[Any] = [linear for layer in network.layers for linear in layer.projections]
        tensors = [weight, *network.norms, *rotations]
        for linear in projections:
            if not isinstance(linear, nn.Linear) or not linear.weight.t().is_contiguous():
                return False
            tensors += [linear.weight] + ([] if linear.bias is None else [linear.bias])
        even = all(linear.weight.shape[1] % 2 == 0 for linear in projections)
        return in_c(weight, *tensors) and (even or weight.dtype == torch.float32) and weight.is_contiguous()

    def runs(self, tokens: Tensor, cache: Cache) -> bool:
        """Return whether C computes this forward.

        No projection may have hooks but those of an adapter for rows that draft; with one, none of `tokens` may draft.
        No K/V must be kept finite.
        """
        hooked = any(
            len(linear._forward_hooks) > (adapter_of(linear) is not None) or linear._forward_pre_hooks
            for linear in self.projections
        )
        if hooked or cache.must_be_finite is not None or not in_c(self.network.embedding, cache.keys):
            return False
        return self.network.mask_rows is None or not self.network.drafting(tokens, cache).any()

    def __call__(
        self, tokens: Tensor, positions: Tensor, cache: Cache, sees: native.Plan, wanted: Tensor | None = None
    ) -> Tensor:
        """Return what the network returns, with attention in C; `sees` is what the rows see."""
        return native.layers(
            self.weights, self.shape, self.network.embedding, self.network.norms[-1], tokens, positions,
            self.rotations, cache.keys, cache.values, cache.scratch, cache.slots, sees, wanted,
        )  # fmt: skip


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
