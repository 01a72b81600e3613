"""What lies between products, in one kernel each: residual sum and norm, SwiGLU's gate, activations to fp8.

A program keeps its numbers in registers, a whole row of them where the row has to be known as a whole.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lopa_dist.kernels.dispatch import OPTIONS

GATE_BLOCK = 2048  # columns a program of SwiGLU's: 16 a thread, two vector loads each of gate and up


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `rows.add_rms_norm`. Pad rows may hold anything: no row is read by another's program.

    Two rows are read and two written; torch's operators move about four times as much.
    """
    rows, size = x.shape
    x, residual = x.contiguous(), residual.contiguous()
    normed, total = torch.empty_like(x), torch.empty_like(x)
    block = triton.next_power_of_2(size)
    if rows:
        add_rms_norm_kernel[(rows,)](
            x, residual, weight, normed, total, eps,
            SIZE=size, BLOCK=block, num_warps=min(max(block // 512, 1), 16), **OPTIONS,
        )  # fmt: skip
    return normed, total


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
    """Grid ``(R,)``."""
    dtype = normed.dtype.element_ty
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + columns
    summed = tl.load(residual + at, inside, 0).to(tl.float32) + tl.load(x + at, inside, 0).to(tl.float32)
    summed = summed.to(dtype)
    tl.store(total + at, summed, inside)
    wide = summed.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide) / SIZE + eps)
    scale = tl.load(weight + columns, inside, 0).to(tl.float32)
    tl.store(normed + at, (wide.to(dtype).to(tl.float32) * scale).to(dtype), inside)


def swiglu(gate_up: Tensor) -> Tensor:
    """As `rows.swiglu`: what lies between its projections is read once and written once."""
    gate_up = gate_up.contiguous()
    rows, size = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    if rows:
        grid = (rows, triton.cdiv(size, GATE_BLOCK))
        swiglu_kernel[grid](gate_up, out, SIZE=size, BLOCK=GATE_BLOCK, num_warps=4, **OPTIONS)
    return out


@triton.jit
def swiglu_kernel(
    gate_up: tl.tensor,  # [R, 2 SIZE]
    out: tl.tensor,  # [R, SIZE]
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid ``(R, tiles of BLOCK columns)``. Rounds between the two products, as torch's operators do."""
    dtype = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + columns, inside, 0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + columns, inside, 0).to(tl.float32)
    silu = (gate / (1 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out + row * SIZE + columns, (silu * up).to(dtype), inside)


def quantize_rows(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """As `quantized.quantize_rows`, in its bits; as fp32, what the cast gets."""
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
def quantize_rows_kernel(
    x: tl.tensor,  # [M, SIZE]
    out: tl.tensor,  # [M, SIZE]
    scale: tl.tensor,  # [M]
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid ``(M,)``."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    wide = tl.load(x + row * SIZE + columns, inside, 0).to(tl.float32)
    greatest = tl.maximum(tl.max(tl.abs(wide)), 7.888609052210118e-31)  # 2^-100, quantized.SMALLEST
    broken = tl.max((tl.abs(wide) < float("inf")).to(tl.int32) ^ 1) > 0  # maxima and casts may lose a NaN
    tl.store(scale + row, tl.where(broken, float("nan"), tl.div_rn(greatest, 448.0)))
    tl.store(out + row * SIZE + columns, (wide * (tl.div_rn(1.0, greatest) * 448.0)).to(out.dtype.element_ty), inside)
