"""From projection to attention in one kernel: norms of q and k, rotation, K/V into the pool.

A program takes `HEADS` successive heads of one row, of any kind: q, k and v are adjacent in the projection. Every
number is read once and written once. The kernel rounds where torch's operators round.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lopa_dist.kernels.dispatch import OPTIONS

TILE = 2048  # numbers per program, about: 16 per thread


def rope_and_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    scratch: int,
    rows: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    must_be_finite: Tensor | None = None,
    slots: Tensor | None = None,
) -> Tensor:
    """Compute `rope.rope_and_store`, with `cos` and `sin` ``[R, D]``."""
    count, (kv_heads, dim) = len(qkv), keys.shape[1:]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    q = qkv.new_empty(count, heads, dim)
    half = triton.next_power_of_2(dim // 2)
    at_once = min(max(TILE // (2 * half), 1), triton.next_power_of_2(heads + 2 * kv_heads))
    q_norm, k_norm = (qkv, qkv) if norms is None else norms  # never read without norms
    if count:
        rope_and_store_kernel[(count, triton.cdiv(heads + 2 * kv_heads, at_once))](
            qkv, cos, sin, q_norm, k_norm, q, keys, values, rows, rows if must_be_finite is None else must_be_finite,
            rows if slots is None else slots, scratch,
            qkv.stride(0), cos.stride(0), sin.stride(0), keys.stride(0), values.stride(0), eps,
            H=heads, KV=kv_heads, D=dim, HALF=half, HEADS=at_once, NORM=norms is not None,
            CLEARS=must_be_finite is not None, SLOTS=slots is not None, num_warps=4, **OPTIONS,
        )  # fmt: skip
    return q


@triton.jit
def finite(x: tl.tensor, of_window: tl.tensor) -> tl.tensor:
    """Return `x`, with 0 for infinities and NaN unless the row is `of_window`."""
    return tl.where((tl.abs(x.to(tl.float32)) < float("inf")) | of_window, x, 0.0)


@triton.jit(do_not_specialize=["scratch"])
def rope_and_store_kernel(
    qkv: tl.tensor,  # [R, (H + 2 KV) * D]
    cos: tl.tensor,  # [R, D], of which the first half is read
    sin: tl.tensor,  # [R, D], of which the second half is read, which has sin; the first half has -sin
    q_norm: tl.tensor,  # [D]
    k_norm: tl.tensor,  # [D]
    q: tl.tensor,  # [R, H, D]
    keys: tl.tensor,  # [slots, KV, D]
    values: tl.tensor,  # [slots, KV, D]
    rows: tl.tensor,  # [1]
    must_be_finite: tl.tensor,  # [R], read with CLEARS
    slots: tl.tensor,  # [R], read with SLOTS
    scratch: tl.tensor,
    qkv_stride: tl.tensor,
    cos_stride: tl.tensor,
    sin_stride: tl.tensor,
    keys_stride: tl.tensor,
    values_stride: tl.tensor,
    eps: tl.tensor,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    CLEARS: tl.constexpr,
    SLOTS: tl.constexpr,
) -> None:
    """Normalise, rotate and store HEADS heads of one row. Grid ``(R, tiles of HEADS heads)``."""
    row = tl.program_id(0)
    if row >= tl.load(rows):
        return
    row = row.to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64) if SLOTS else row + scratch
    dtype = q.dtype.element_ty
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None]
    half = D // 2
    inside = (column < half) & (head < H + 2 * KV)
    source = qkv + row * qkv_stride + head * D + column
    raw_first, raw_second = tl.load(source, inside, 0), tl.load(source + half, inside, 0)
    is_value = head >= H + KV
    first_value, second_value = raw_first, raw_second
    if CLEARS:
        of_window = tl.load(must_be_finite + row) == 0
        first_value, second_value = finite(raw_first, of_window), finite(raw_second, of_window)
    tl.store(values + slot * values_stride + (head - H - KV) * D + column, first_value, inside & is_value)
    tl.store(values + slot * values_stride + (head - H - KV) * D + column + half, second_value, inside & is_value)

    first, second = raw_first.to(tl.float32), raw_second.to(tl.float32)
    if NORM:
        inverse = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / D + eps)[:, None]
        for_q, for_k = inside & (head < H), inside & (head >= H) & (head < H + KV)
        first_scale = tl.load(q_norm + column + head * 0, for_q, 0).to(tl.float32)
        first_scale += tl.load(k_norm + column + head * 0, for_k, 0).to(tl.float32)
        second_scale = tl.load(q_norm + half + column + head * 0, for_q, 0).to(tl.float32)
        second_scale += tl.load(k_norm + half + column + head * 0, for_k, 0).to(tl.float32)
        first = ((first * inverse).to(dtype).to(tl.float32) * first_scale).to(dtype).to(tl.float32)
        second = ((second * inverse).to(dtype).to(tl.float32) * second_scale).to(dtype).to(tl.float32)
    c = tl.load(cos + row * cos_stride + column, column < half, 0).to(tl.float32)
    s = tl.load(sin + row * sin_stride + half + column, column < half, 0).to(tl.float32)
    wide = cos.dtype.element_ty
    turned_first = (first * c).to(wide).to(tl.float32) - (second * s).to(wide).to(tl.float32)
    turned_second = (second * c).to(wide).to(tl.float32) + (first * s).to(wide).to(tl.float32)

    target = q + row * (H * D) + head * D + column
    tl.store(target, turned_first.to(dtype), inside & (head < H))
    tl.store(target + half, turned_second.to(dtype), inside & (head < H))
    target = keys + slot * keys_stride + (head - H) * D + column
    is_key = inside & (head >= H) & (head < H + KV)
    first_key, second_key = turned_first.to(dtype), turned_second.to(dtype)
    if CLEARS:
        of_window = tl.load(must_be_finite + row) == 0
        first_key, second_key = finite(first_key, of_window), finite(second_key, of_window)
    tl.store(target, first_key, is_key)
    tl.store(target + half, second_key, is_key)
