"""The transformer as engines run it: merged projections, fused small operations, K/V written into the pool.

It has the same weights and arithmetic as `transformer`, in 9 kernels per layer instead of about 40: q, k and v are one
product, gate and up another; a residual is added where the next norm reads it; rotation, per-head norms and the K/V
write are one pass. Nothing here depends on a tensor's values or on the number of real rows, so a CUDA graph can capture
all of it. On a CPU the plain forms of the kernels run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from lopa_dist.kernels.product import product
from lopa_dist.kernels.quantized import QuantizedRows
from lopa_dist.kernels.rope import rope_and_store
from lopa_dist.kernels.rows import add_rms_norm, add_rms_norm_fp8, embed_rms_norm, swiglu, swiglu_fp8
from lopa_dist.kernels.virtual_gemm import vgemm
from lopa_dist.models.experts import SparseMLP
from lopa_dist.models.mask_rows import adapter_of, attach_joined
from lopa_dist.models.quantize import QuantizedLinear, joined, laid_out
from lopa_dist.models.transformer import MLP, Layer, RMSNorm, Transformer, query_scale_of, rope_of
from lopa_dist.staging import every_row

CPU_ROWS = 512  # rows of the feed-forward at once on a CPU, so that its intermediate results stay small

Activations: TypeAlias = Tensor | QuantizedRows
AttendCached = Callable[[int, Tensor], Tensor]
"""``(layer, q [R, H, D]) -> [R, H, D]``; the rows' K/V are in the cache already."""


@dataclass
class Cache:
    """Where the packed rows' K/V go: row r of layer l to slot ``scratch + r`` of ``keys[l]`` and ``values[l]``."""

    keys: Tensor  # [layers, slots, Hkv, D]
    values: Tensor
    scratch: int
    must_be_finite: Tensor | None = None  # [R] bool, rows whose K/V must be finite (`kernels.rope.without_overflow`)
    slots: Tensor | None = None  # [R] the slots that the rows' K/V go to instead


class FusedLayer:
    """One layer's merged weights; the weights of the modules that they come from become views of them."""

    def __init__(self, layer: Layer) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.before, self.after = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        together: list[list[nn.Module]] = [[attention.q_proj, attention.k_proj, attention.v_proj]]
        self.qkv = joined(together[0])
        q_norm, k_norm = attention.q_norm, attention.k_norm
        self.head_norms: tuple[Tensor, Tensor] | None = None
        if isinstance(q_norm, RMSNorm) and isinstance(k_norm, RMSNorm):
            self.head_norms = q_norm.weight, k_norm.weight
        self.out = laid_out(attention.o_proj)
        self.projections = [self.qkv, self.out]
        self.experts = mlp if isinstance(mlp, SparseMLP) else None
        if isinstance(mlp, MLP):
            together.append([mlp.gate_proj, mlp.up_proj])
            self.gate_up, self.down = joined(together[1]), laid_out(mlp.down_proj)
            self.projections += [self.gate_up, self.down]
        self.parts = list(zip(self.projections[::2], together, strict=False))  # merged projections, and of what


class FusedTransformer:
    """``tokens [R], positions [R] -> hidden [R, d]``, of one rank's part if the model is split over several."""

    def __init__(self, model: Transformer) -> None:
        self.real_rows_only, self.config = False, model.config
        self.layers = [FusedLayer(layer) for layer in model.model.layers]  # type: ignore[arg-type]
        self.take_adapter(model)
        self.norms = [layer.before for layer in self.layers] + [model.model.norm.weight]
        laid_out(model.lm_head)  # if it is also the embedding, rows take longer to look up, but there is no second copy
        self.head = model.head_weight
        # whether torch computes some product: then only whole tiles of rows make a row's bits independent of other rows
        self.needs_tiles = any(
            layer.experts is not None or any(isinstance(linear, QuantizedLinear) for linear in layer.projections)
            for layer in self.layers
        )
        # weights and biases by projection: calling the module takes 8 us longer on a CPU
        self.operands: dict[nn.Module, tuple[Tensor, Tensor | None]] = {
            linear: (linear.weight.t(), linear.bias)
            for layer in self.layers
            for linear in layer.projections
            if isinstance(linear, nn.Linear)
        }

    def take_adapter(self, model: Transformer) -> None:
        """Use the model's current adapter for rows that draft, and its embedding, to which the adapter may add a mask.

        The merged weights do not change, because they are the base model's.
        """
        self.mask_rows, self.adapters, self.embedding = model.mask_rows, model.adapters, model.model.embed_tokens.weight
        for layer in self.layers:
            for joint, parts in layer.parts:
                attach_joined(joint, parts)

    def with_virtual_padding(self) -> FusedTransformer:
        """Return the same network with products by `vgemm`: a row's bits do not depend on how many rows there are."""
        chosen = copy.copy(self)
        chosen.real_rows_only = True
        return chosen

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        rows: Tensor | None,
        cache: Cache,
        attend: AttendCached,
        wanted: Tensor | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Return hidden states after the final norm, ``[R, d]``; with `wanted` ``[H]``, only of these rows, ``[H, d]``.

        After the last layer's attention only these are computed, which is all that a prediction needs: the other rows
        are there for their K/V.

        Args:
            tokens, positions: ``[R]``.
            rows: ``[1]`` int32 on the device, how many rows are real. The others may hold anything; they write no K/V.
                None: all are real.
            cache: where the rows' K/V go.
            attend: attention, which knows what rows see.
            wanted: row numbers; None: all.
            rope: cosines and sines of the positions, ``[R, 1, D]`` each; None: they are computed here (`rope_of`).
        """
        eps = self.config.rms_eps
        cos, sin = rope or rope_of(self.config, positions, self.embedding.dtype)
        query_scale = query_scale_of(self.config, positions, self.embedding.dtype)
        stored = rows  # number of rows whose K/V are stored: a GPU's kernel reads it in every layer
        if rows is None and tokens.is_cuda:
            stored = every_row(tokens)
        if self.mask_rows is not None:
            self.mask_rows.begin(self.drafting(tokens, cache))
        normed: Activations
        normed, x = embed_rms_norm(tokens, self.embedding, self.norms[0], eps)
        keys, values = cache.keys.unbind(), cache.values.unbind()
        for number, layer in enumerate(self.layers):
            qkv = self.project(layer.qkv, normed, rows)
            q = rope_and_store(
                qkv, cos, sin, keys[number], values[number], cache.scratch, stored, layer.head_norms, eps,
                cache.must_be_finite, cache.slots,
            )  # fmt: skip
            attended = attend(number, q if query_scale is None else q * query_scale).flatten(1)
            if wanted is not None and layer is self.layers[-1]:
                attended, x = attended.index_select(0, wanted), x.index_select(0, wanted)
                if self.mask_rows is not None:
                    self.mask_rows.begin(self.drafting(tokens, cache)[wanted])
            gate_up = layer.gate_up if layer.experts is None else None
            normed, x = self.add_norm(self.project(layer.out, attended, rows), x, layer.after, gate_up)
            following = self.layers[number + 1].qkv if layer is not self.layers[-1] else None
            normed, x = self.add_norm(self.feed_forward(layer, normed, rows), x, self.norms[number + 1], following)
        assert isinstance(normed, Tensor)
        return normed

    def add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, into: nn.Module | None
    ) -> tuple[Activations, Tensor]:
        """Return the norm of a residual sum, quantised if the product `into` accepts fp8, and the sum itself."""
        norm = add_rms_norm_fp8 if takes_fp8(into) else add_rms_norm
        return norm(x, residual, weight, self.config.rms_eps)

    def drafting(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Return which rows draft, ``[R]`` bool: masks; if masks draft in blocks, all rows whose K/V are not kept."""
        if self.config.block_drafts and cache.slots is not None:
            return cache.slots >= cache.scratch
        return tokens == self.config.mask_id

    def feed_forward(self, layer: FusedLayer, x: Activations, rows: Tensor | None) -> Tensor:
        """Return the SwiGLU feed-forward of x ``[R, d]``, or its experts' output."""
        if rows is None and x.device.type == "cpu" and len(x) > CPU_ROWS:
            return torch.cat([self.part(layer, x, begin) for begin in range(0, len(x), CPU_ROWS)])
        if layer.experts is not None:
            return layer.experts(x, rows)
        gate = swiglu_fp8 if takes_fp8(layer.down) else swiglu
        return self.project(layer.down, gate(self.project(layer.gate_up, x, rows)), rows)

    def part(self, layer: FusedLayer, x: Activations, begin: int) -> Tensor:
        """Return the feed-forward of the `CPU_ROWS` rows from `begin` on."""
        rows = slice(begin, begin + CPU_ROWS)
        with nullcontext() if self.mask_rows is None else self.mask_rows.only(rows):
            return self.feed_forward(layer, x[rows], None)

    def project(self, linear: nn.Module, x: Activations, rows: Tensor | None) -> Tensor:
        """Return the projection ``[R, N]`` of x ``[R, K]``; with `rows`, what is not of a real row is undefined."""
        if isinstance(linear, QuantizedLinear):  # eight-bit products always skip pad rows
            return linear(x, rows)
        if self.real_rows_only:
            assert isinstance(linear, nn.Linear)
            assert isinstance(x, Tensor)
            assert rows is not None
            y = vgemm(x, linear.weight, rows, linear.bias)
            adapter = adapter_of(linear)
            return y if adapter is None else adapter.add(x, y)
        if linear._forward_hooks or linear._forward_pre_hooks:  # hooks of an adapter, or of tensor ranks
            return linear(x)
        assert isinstance(x, Tensor)
        return product(x, *self.operands[linear])


def takes_fp8(linear: nn.Module | None) -> bool:
    """Return whether a projection's input may be `QuantizedRows`."""
    return isinstance(linear, QuantizedLinear) and linear.takes_fp8
