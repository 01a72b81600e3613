"""Persistent matrix product that reads the number of real rows from the device.

As many programs as fit on the GPU loop over the tiles of the real rows, in groups of row tiles that share a column
tile's weight in L2. Column tiles are narrow where wide ones would leave multiprocessors idle, as in a small bucket. The
loop over K has the same order and step for every tile width, and no tile is split along K: a row's bits do not depend
on the number of rows.

An int8 weight is the left operand of the product, since tensor cores read that side from registers, where it is
converted; the scales of its rows are applied to the sums.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from lopa_dist.kernels.dispatch import OPTIONS, processors, shared_memory

GROUP = 8  # row tiles that share a column tile


@dataclass(frozen=True)
class GemmTile:
    """Sizes of a tile and of its pipeline, and programs per multiprocessor. Only `bk` affects the bits."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    resident: int = 1


# Each from wide to narrow, all with one `bk`. Narrower tiles load more steps ahead.
HALF = (
    GemmTile(128, 256, 64, 8, 3),
    GemmTile(128, 128, 64, 8, 4),
    GemmTile(128, 64, 64, 4, 6),
    GemmTile(128, 32, 64, 4, 7),
)
# No narrower ones: Hopper's matrix instructions take 64 rows or more of the left operand, here the weight.
INT8 = (GemmTile(128, 128, 64, 4, 4, 2), GemmTile(128, 64, 64, 4, 7))
FP32 = (GemmTile(64, 64, 32, 4, 2, 2), GemmTile(64, 32, 32, 4, 2, 2))  # without tensor cores, which would round it


def config(x: Tensor, weight: Tensor) -> GemmTile:
    """Return the widest tile of which every multiprocessor gets one, else the narrowest; `x` has the bucket's rows."""
    tiles = FP32 if x.dtype == torch.float32 else INT8 if weight.dtype == torch.int8 else HALF
    chosen = next((tile for tile in tiles if count(x, weight, tile) >= processors(x.device)), tiles[-1])
    return fitting(chosen, x.element_size(), weight.element_size(), shared_memory(x.device))


def fitting(tile: GemmTile, x_bytes: int, weight_bytes: int, room: int) -> GemmTile:
    """Return the tile with no more stages than fit in `room` bytes of shared memory; stages change no bits.

    While one stage's blocks of both operands are multiplied, those of the other stages are being loaded.
    """
    of_stage = tile.bk * (tile.bm * x_bytes + tile.bn * weight_bytes)
    return replace(tile, stages=max(min(tile.stages, 1 + room // of_stage), 2))


def count(x: Tensor, weight: Tensor, tile: GemmTile) -> int:
    """Return the number of tiles of a product."""
    return -(-len(x) // tile.bm) * -(-len(weight) // tile.bn)


def vgemm(
    x: Tensor,
    weight: Tensor,
    rows: Tensor,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    tile: GemmTile | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute `virtual_gemm.vgemm`; `tile` is for benchmarks. Rows of `out` that are not real are not written."""
    x, weight = x.contiguous(), weight.contiguous()
    (m, k), n = x.shape, len(weight)
    chosen = tile or config(x, weight)
    out = x.new_empty(m, n) if out is None else out
    if m:
        vgemm_kernel[(min(count(x, weight, chosen), processors(x.device) * chosen.resident),)](
            x, weight, x if bias is None else bias, x if scale is None else scale, out, rows,
            N=n, K=k, BM=chosen.bm, BN=chosen.bn, BK=chosen.bk, GROUP=GROUP, STAGES=chosen.stages,
            BIAS=bias is not None, INT8=scale is not None,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=chosen.warps, **OPTIONS,
        )  # fmt: skip
    return out


@triton.jit
def vgemm_kernel(
    x: tl.tensor,  # [M, K]
    weight: tl.tensor,  # [N, K]
    bias: tl.tensor,  # [N]
    scale: tl.tensor,  # [N]
    out: tl.tensor,  # [M, N]
    rows: tl.tensor,  # [1]
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    BIAS: tl.constexpr,
    INT8: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Multiply the real rows. Grid ``(programs,)``, any number of them."""
    limit = tl.load(rows)
    row_tiles, column_tiles = tl.cdiv(limit, BM), tl.cdiv(N, BN)
    k = tl.arange(0, BK)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        group = tile // (GROUP * column_tiles)
        height = tl.minimum(row_tiles - group * GROUP, GROUP)
        inner = tile - group * GROUP * column_tiles
        row = (group * GROUP + inner % height) * BM + tl.arange(0, BM)
        column = (inner // height) * BN + tl.arange(0, BN)
        a = x + row[:, None].to(tl.int64) * K + k[None]
        b = weight + column[:, None].to(tl.int64) * K + k[None]
        real, inside = (row < limit)[:, None], (column < N)[:, None]
        sums = tl.zeros([BN, BM], tl.float32) if INT8 else tl.zeros([BM, BN], tl.float32)
        for start in tl.range(0, K, BK, num_stages=STAGES):
            if K % BK == 0:
                left, right = tl.load(a, real, 0), tl.load(b, inside, 0)
            else:
                left = tl.load(a, real & (k < K - start)[None], 0)
                right = tl.load(b, inside & (k < K - start)[None], 0)
            if INT8:
                sums = tl.dot(right.to(left.dtype), left.T, sums, input_precision=PRECISION)
            else:
                sums = tl.dot(left, right.T, sums, input_precision=PRECISION)
            a += BK
            b += BK
        if INT8:
            sums = sums.T * tl.load(scale + column, column < N, 0)[None]
        if BIAS:
            sums += tl.load(bias + column, column < N, 0).to(tl.float32)[None]
        at = out + row[:, None].to(tl.int64) * N + column[None]
        tl.store(at, sums.to(out.dtype.element_ty), real & (column < N)[None])
