"""Row-wise operations between products, in one kernel each: embedding and norm, residual sum and norm, SwiGLU's gate,
and quantisation to fp8, alone or after one of these.

A program keeps its numbers in registers, and a whole row of them where an operation needs the whole row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lopa_dist.kernels.dispatch import OPTIONS
from lopa_dist.kernels.quantized import FP8

GATE_BLOCK = 2048  # columns per program of SwiGLU: 16 per thread, two vector loads each of gate and up
FP8_BLOCK = 8192  # columns at a time where SwiGLU's result is quantised: 16 per thread


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute `rows.add_rms_norm`. Pad rows may hold anything: no program reads another's row.

    Two rows are read and two written; torch's operators move about four times as much.
    """
    rows, size = x.shape
    x, residual = x.contiguous(), residual.contiguous()
    normed, total = torch.empty_like(x), torch.empty_like(x)
    if rows:
        add_rms_norm_kernel[(rows,)](x, residual, weight, normed, total, eps, **whole_row(size), **OPTIONS)
    return normed, total


def add_rms_norm_fp8(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype = FP8
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the fp8 numbers, scales and sums of `rows.add_rms_norm_fp8`. With `dtype` fp32 nothing is cast."""
    rows, size = x.shape
    x, residual = x.contiguous(), residual.contiguous()
    eight, scale, total = torch.empty_like(x, dtype=dtype), x.new_empty(rows, dtype=torch.float32), torch.empty_like(x)
    if rows:
        add_rms_norm_fp8_kernel[(rows,)](x, residual, weight, eight, scale, total, eps, **whole_row(size), **OPTIONS)
    return eight, scale, total


def embed_rms_norm(tokens: Tensor, embedding: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute `rows.embed_rms_norm`."""
    rows, size = len(tokens), embedding.shape[1]
    normed, embedded = embedding.new_empty(2, rows, size)
    if rows:
        embed_rms_norm_kernel[(rows,)](tokens, embedding, weight, normed, embedded, eps, **whole_row(size), **OPTIONS)
    return normed, embedded


def whole_row(size: int) -> dict[str, int]:
    """Return how to launch a program that keeps a row of `size` numbers in registers."""
    block = triton.next_power_of_2(size)
    return {"SIZE": size, "BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}


@triton.jit
def normalised(
    numbers: tl.tensor,  # [BLOCK] a row, rounded; 0 after its end
    weight: tl.tensor,  # [SIZE]
    columns: tl.tensor,
    inside: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
) -> tl.tensor:
    """Return `rows.rms_norm` of a row, rounded wherever torch's operators round."""
    dtype = numbers.dtype
    wide = numbers.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide) / SIZE + eps)
    scale = tl.load(weight + columns, inside, 0).to(tl.float32)
    return (wide.to(dtype).to(tl.float32) * scale).to(dtype)


@triton.jit
def row_sum(x: tl.tensor, residual: tl.tensor, at: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Return the rounded sum of two rows."""
    summed = tl.load(residual + at, inside, 0).to(tl.float32) + tl.load(x + at, inside, 0).to(tl.float32)
    return summed.to(x.dtype.element_ty)


@triton.jit
def add_rms_norm_kernel(
    x: tl.tensor,  # [R, SIZE]
    residual: tl.tensor,  # [R, SIZE]
    weight: tl.tensor,  # [SIZE]
    normed: tl.tensor,  # [R, SIZE]
    total: tl.tensor,  # [R, SIZE]
    eps: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Add two rows, and normalise the sum. Grid ``(R,)``."""
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + columns
    summed = row_sum(x, residual, at, inside)
    tl.store(total + at, summed, inside)
    tl.store(normed + at, normalised(summed, weight, columns, inside, eps, SIZE), inside)


@triton.jit
def add_rms_norm_fp8_kernel(
    x: tl.tensor,  # [R, SIZE]
    residual: tl.tensor,  # [R, SIZE]
    weight: tl.tensor,  # [SIZE]
    eight: tl.tensor,  # [R, SIZE]
    scale: tl.tensor,  # [R]
    total: tl.tensor,  # [R, SIZE]
    eps: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Add two rows, and normalise and quantise the sum. Grid ``(R,)``."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    at = row * SIZE + columns
    summed = row_sum(x, residual, at, inside)
    tl.store(total + at, summed, inside)
    normed = normalised(summed, weight, columns, inside, eps, SIZE).to(tl.float32)
    greatest = greatest_of(normed)
    tl.store(scale + row, scale_of(greatest, broken(normed)))
    tl.store(eight + at, in_eight_bits(normed, greatest).to(eight.dtype.element_ty), inside)


@triton.jit
def embed_rms_norm_kernel(
    tokens: tl.tensor,  # [R]
    embedding: tl.tensor,  # [V, SIZE]
    weight: tl.tensor,  # [SIZE]
    normed: tl.tensor,  # [R, SIZE]
    embedded: tl.tensor,  # [R, SIZE]
    eps: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Look up a token's embedding, and normalise it. Grid ``(R,)``."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    numbers = tl.load(embedding + tl.load(tokens + row).to(tl.int64) * SIZE + columns, inside, 0)
    tl.store(embedded + row * SIZE + columns, numbers, inside)
    tl.store(normed + row * SIZE + columns, normalised(numbers, weight, columns, inside, eps, SIZE), inside)


def swiglu(gate_up: Tensor) -> Tensor:
    """Compute `rows.swiglu`, reading the projection once and writing the result once."""
    gate_up = gate_up.contiguous()
    rows, size = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    if rows:
        grid = (rows, triton.cdiv(size, GATE_BLOCK))
        swiglu_kernel[grid](gate_up, out, SIZE=size, BLOCK=GATE_BLOCK, num_warps=4, **OPTIONS)
    return out


def swiglu_fp8(gate_up: Tensor, dtype: torch.dtype = FP8) -> tuple[Tensor, Tensor]:
    """Return the fp8 numbers and scales of `rows.swiglu_fp8`. With `dtype` fp32 nothing is cast."""
    gate_up = gate_up.contiguous()
    rows, size = len(gate_up), gate_up.shape[1] // 2
    eight, scale = gate_up.new_empty(rows, size, dtype=dtype), gate_up.new_empty(rows, dtype=torch.float32)
    if rows:
        block = min(triton.next_power_of_2(size), FP8_BLOCK)
        warps = max(block // 512, 1)
        swiglu_fp8_kernel[(rows,)](gate_up, eight, scale, SIZE=size, BLOCK=block, num_warps=warps, **OPTIONS)
    return eight, scale


@triton.jit
def gated(gate_up: tl.tensor, begin: tl.tensor, columns: tl.tensor, inside: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """Return ``silu(gate) * up`` of a row's columns, rounded between the two products, as torch's operators do."""
    dtype = gate_up.dtype.element_ty
    gate = tl.load(gate_up + begin + columns, inside, 0).to(tl.float32)
    up = tl.load(gate_up + begin + SIZE + columns, inside, 0).to(tl.float32)
    silu = (gate / (1 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return (silu * up).to(dtype)


@triton.jit
def swiglu_kernel(
    gate_up: tl.tensor,  # [R, 2 SIZE]
    out: tl.tensor,  # [R, SIZE]
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Compute SwiGLU's gate for BLOCK columns of a row. Grid ``(R, tiles of BLOCK columns)``."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    tl.store(out + row * SIZE + columns, gated(gate_up, row * 2 * SIZE, columns, inside, SIZE), inside)


@triton.jit
def swiglu_fp8_kernel(
    gate_up: tl.tensor,  # [R, 2 SIZE]
    eight: tl.tensor,  # [R, SIZE]
    scale: tl.tensor,  # [R]
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Compute SwiGLU's gate for a row, and quantise it. Grid ``(R,)``.

    The row is read twice: its scale must be known first, and the second time it is in the L2 cache.
    """
    row = tl.program_id(0).to(tl.int64)
    greatest = tl.zeros((), tl.float32)
    is_broken = tl.zeros((), tl.int1)
    for begin in range(0, SIZE, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        numbers = gated(gate_up, row * 2 * SIZE, columns, columns < SIZE, SIZE).to(tl.float32)
        greatest = tl.maximum(greatest, greatest_of(numbers))
        is_broken = is_broken | broken(numbers)
    tl.store(scale + row, scale_of(greatest, is_broken))
    for begin in range(0, SIZE, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        inside = columns < SIZE
        numbers = gated(gate_up, row * 2 * SIZE, columns, inside, SIZE).to(tl.float32)
        tl.store(eight + row * SIZE + columns, in_eight_bits(numbers, greatest).to(eight.dtype.element_ty), inside)


def quantize_rows(x: Tensor, dtype: torch.dtype = FP8) -> tuple[Tensor, Tensor]:
    """Return the numbers and scales of `quantized.quantize_rows`, to the bit. With `dtype` fp32 nothing is cast."""
    x = x.contiguous()
    rows, size = x.shape
    out = torch.empty_like(x, dtype=dtype)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(size)
    if rows:
        warps = min(max(block // 1024, 1), 16)
        quantize_rows_kernel[(rows,)](x, out, scale, SIZE=size, BLOCK=block, num_warps=warps, **OPTIONS)
    return out, scale


@triton.jit
def greatest_of(wide: tl.tensor) -> tl.tensor:
    """Return the greatest absolute number, at least 2^-100 (`quantized.SMALLEST`)."""
    return tl.maximum(tl.max(tl.abs(wide)), 7.888609052210118e-31)


@triton.jit
def broken(wide: tl.tensor) -> tl.tensor:
    """Return whether any number is NaN or infinite, which maxima and casts may lose."""
    return tl.max((tl.abs(wide) < float("inf")).to(tl.int32) ^ 1) > 0


@triton.jit
def scale_of(greatest: tl.tensor, is_broken: tl.tensor) -> tl.tensor:
    """Return a row's scale, by which its fp8 numbers are multiplied."""
    return tl.where(is_broken, float("nan"), tl.div_rn(greatest, 448.0))


@triton.jit
def in_eight_bits(wide: tl.tensor, greatest: tl.tensor) -> tl.tensor:
    """Return the numbers that are cast to fp8."""
    return wide * (tl.div_rn(1.0, greatest) * 448.0)


@triton.jit
def quantize_rows_kernel(
    x: tl.tensor,  # [M, SIZE]
    out: tl.tensor,  # [M, SIZE]
    scale: tl.tensor,  # [M]
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Quantise one row. Grid ``(M,)``."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    wide = tl.load(x + row * SIZE + columns, inside, 0).to(tl.float32)
    greatest = greatest_of(wide)
    tl.store(scale + row, scale_of(greatest, broken(wide)))
    tl.store(out + row * SIZE + columns, in_eight_bits(wide, greatest).to(out.dtype.element_ty), inside)
