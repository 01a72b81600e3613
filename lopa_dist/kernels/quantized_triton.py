"""Activations to fp8 in one pass: a program keeps a row in registers from its greatest number to the cast."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lopa_dist.kernels.dispatch import OPTIONS


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
