"""Rows in groups of their experts times int8 weights: the groups' places are read from the device.

A program takes `ROW_TILE` rows, which are all of one expert, and a tile of columns. Tiles of one expert lie side by
side, so they share its weight in L2. As in `virtual_gemm_triton`, the weight takes the left side of the product, and
the walk over K is the same for every row: a row's bits do not depend on the others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lopa_dist.kernels.dispatch import OPTIONS, processors
from lopa_dist.ragged import ROW_TILE

COLUMNS = 64  # of a tile: the least of Hopper's matrix instructions
DEPTH = {torch.float32: 32}  # numbers of a step along K; it is part of the bits
USUAL_DEPTH = 128
RESIDENT = 4  # programs a processor


def expert_linear(x: Tensor, weight: Tensor, scale: Tensor, ends: Tensor) -> Tensor:
    """As `experts.expert_linear`, of an int8 weight; rows behind the last group are not written."""
    x, weight, scale = x.contiguous(), weight.contiguous(), scale.contiguous()
    (rows, k), n = x.shape, weight.shape[1]
    begins = torch.arange(0, rows, ROW_TILE, device=x.device, dtype=ends.dtype)
    expert = torch.searchsorted(ends, begins, right=True).clamp_(max=len(weight) - 1).int()
    out = x.new_empty(rows, n)
    if rows:
        programs = min(len(expert) * -(-n // COLUMNS), RESIDENT * processors(x.device))
        expert_kernel[(programs,)](
            x, weight, scale, out, expert, ends[-1:],
            N=n, K=k, BM=ROW_TILE, BN=COLUMNS, BK=DEPTH.get(x.dtype, USUAL_DEPTH),
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=4, num_stages=4, **OPTIONS,
        )  # fmt: skip
    return out


@triton.jit
def expert_kernel(
    x: tl.tensor,  # [P, K]
    weight: tl.tensor,  # [E, N, K]
    scale: tl.tensor,  # [E, N]
    out: tl.tensor,  # [P, N]
    expert: tl.tensor,  # [P / BM] of each tile of rows
    rows: tl.tensor,  # [1] rows that count, whole tiles
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Grid ``(programs,)``, any number of them."""
    row_tiles = tl.load(rows) // BM
    k = tl.arange(0, BK)
    for tile in range(tl.program_id(0), row_tiles * tl.cdiv(N, BN), tl.num_programs(0)):
        row_tile = tile % row_tiles
        row = row_tile * BM + tl.arange(0, BM)
        column = tile // row_tiles * BN + tl.arange(0, BN)
        of_expert = tl.load(expert + row_tile).to(tl.int64) * N
        a = x + row[:, None].to(tl.int64) * K + k[None]
        b = weight + (of_expert + column)[:, None] * K + k[None]
        inside = column < N
        sums = tl.zeros([BN, BM], tl.float32)
        for start in range(0, K, BK):
            if K % BK == 0:
                left, right = tl.load(a), tl.load(b, inside[:, None], 0)
            else:
                left = tl.load(a, (k < K - start)[None], 0)
                right = tl.load(b, inside[:, None] & (k < K - start)[None], 0)
            sums = tl.dot(right.to(left.dtype), left.T, sums, input_precision=PRECISION)
            a += BK
            b += BK
        sums = sums.T * tl.load(scale + of_expert + column, inside, 0)[None]
        tl.store(out + row[:, None].to(tl.int64) * N + column[None], sums.to(out.dtype.element_ty), inside[None])
