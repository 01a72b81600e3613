"""SwiGLU's gate in one kernel: what lies between its projections is read once and written once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lopa_dist.kernels.dispatch import OPTIONS

BLOCK = 2048  # columns a program: 16 a thread, two vector loads each of gate and up


def swiglu(gate_up: Tensor) -> Tensor:
    """As `swiglu.swiglu`."""
    gate_up = gate_up.contiguous()
    rows, size = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    if rows:
        grid = (rows, triton.cdiv(size, BLOCK))
        swiglu_kernel[grid](gate_up, out, SIZE=size, BLOCK=BLOCK, num_warps=4, **OPTIONS)
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
