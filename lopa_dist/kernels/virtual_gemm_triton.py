"""Persistent matrix product that reads the number of real rows from the device.

As many programs as fit on the GPU loop over the tiles of the real rows, in groups of row tiles that share a column
tile's weight in L2. A tile's sums are over all of K, in one order, whatever the tile's sizes and whichever operand is
left: a row's bits do not depend on the number of rows. In half precision an instruction adds 16 numbers, in fp8 32.

Either operand may be the left one. Hopper's instructions take 64 rows or more of the left operand and as few as 8 of
the other. With the weight on the left, a tile of few rows reads hardly more than its weight. An int8 weight is always
there, since tensor cores read that side from registers, where it is converted. Scales of eight-bit numbers are applied
to the sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from lopa_dist.kernels.dispatch import OPTIONS, hopper, processors, shared_memory
from lopa_dist.ragged import UNBOUNDED

GROUP = 8  # row tiles that share a column tile


@dataclass(frozen=True)
class GemmTile:
    """Sizes of a tile and of its pipeline, and programs per multiprocessor. Only `bk` affects bits, in fp32 and fp8."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    resident: int = 1
    swap: bool = True  # whether the weight is the left operand


# For Hopper: by the most rows of `x`, the fastest of the tiles that were measured on an H200, from small to large
HOPPER: Mapping[int, Sequence[GemmTile]] = {
    32: (GemmTile(32, 64, 128, 4, 6),),
    64: (GemmTile(64, 32, 128, 4, 6, swap=False), GemmTile(64, 64, 64, 4, 6, 2)),
    UNBOUNDED: (
        GemmTile(128, 32, 128, 8, 5, swap=False),
        GemmTile(128, 64, 128, 8, 4),
        GemmTile(128, 128, 64, 8, 6),
        GemmTile(128, 256, 64, 8, 3, swap=False),
    ),
}
HOPPER_FP8: Mapping[int, Sequence[GemmTile]] = {  # with more rows the library is faster
    32: (GemmTile(32, 64, 128, 4, 8, 2),),
    UNBOUNDED: (GemmTile(64, 64, 128, 4, 6, 2),),
}
HOPPER_INT8: Mapping[int, Sequence[GemmTile]] = {
    32: (GemmTile(32, 64, 128, 4, 5, 2),),
    64: (GemmTile(64, 64, 128, 4, 6),),
    UNBOUNDED: (GemmTile(128, 64, 64, 4, 7), GemmTile(128, 128, 64, 4, 4, 2)),
}
# For other GPUs, each from wide to narrow. Narrower tiles load more steps ahead.
HALF = (
    GemmTile(128, 256, 64, 8, 3, swap=False),
    GemmTile(128, 128, 64, 8, 4, swap=False),
    GemmTile(128, 64, 64, 4, 6, swap=False),
    GemmTile(128, 32, 64, 4, 7, swap=False),
)
INT8 = (GemmTile(128, 128, 64, 4, 4, 2), GemmTile(128, 64, 64, 4, 7))
# without tensor cores, which would round it
FP32 = (GemmTile(64, 64, 32, 4, 2, 2, swap=False), GemmTile(64, 32, 32, 4, 2, 2, swap=False))


def config(x: Tensor, weight: Tensor) -> GemmTile:
    """Return the tile for a product of `x`, which has the bucket's rows, and `weight`."""
    half, eight = x.dtype != torch.float32, weight.element_size() == 1
    if x.element_size() == 1:
        chosen = one_wave(x, weight, HOPPER_FP8)
    elif half and hopper(x.device):
        chosen = one_wave(x, weight, HOPPER_INT8 if eight else HOPPER)
    else:
        chosen = busy(x, weight, FP32 if not half else INT8 if eight else HALF)
    return fitting(chosen, x.element_size(), weight.element_size(), shared_memory(x.device))


def one_wave(x: Tensor, weight: Tensor, tiles: Mapping[int, Sequence[GemmTile]]) -> GemmTile:
    """Return the smallest tile for the rows of `x` with which no multiprocessor has to compute more than one tile.

    If there is none, return the largest with at least 1.5 tiles for each multiprocessor, or else the largest of all.
    """
    fit = next(fit for most, fit in tiles.items() if len(x) <= most)
    counts, wave = [count(x, weight, tile) for tile in fit], processors(x.device)
    small = (tile for tile, number in zip(fit, counts, strict=True) if number <= wave)
    large = (tile for tile, number in zip(fit[::-1], counts[::-1], strict=True) if number >= 1.5 * wave)
    return next(small, None) or next(large, fit[-1])


def busy(x: Tensor, weight: Tensor, tiles: Sequence[GemmTile]) -> GemmTile:
    """Return the widest of `tiles` (from wide to narrow) that gives each multiprocessor a tile, else the narrowest."""
    return next((tile for tile in tiles if count(x, weight, tile) >= processors(x.device)), tiles[-1])


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
    row_scale: Tensor | None = None,
) -> Tensor:
    """Compute `virtual_gemm.vgemm`, or a product in fp8. Rows of `out` that are not real are not written.

    Args:
        x, weight, rows, bias, scale: as there; both operands may be fp8.
        tile: for tests; None: the fastest.
        out: ``[M, N]``; None: a new tensor in the precision of x, or with fp8 in bf16.
        row_scale: ``[M]`` fp32, the factors of x's rows in fp8.
    """
    x, weight = x.contiguous(), weight.contiguous()
    (m, k), n = x.shape, len(weight)
    chosen = tile or config(x, weight)
    if out is None:
        out = x.new_empty(m, n, dtype=x.dtype if row_scale is None else torch.bfloat16)
    if m:
        vgemm_kernel[(min(count(x, weight, chosen), processors(x.device) * chosen.resident),)](
            x, weight, x if bias is None else bias, x if scale is None else scale,
            x if row_scale is None else row_scale, out, rows,
            N=n, K=k, BM=chosen.bm, BN=chosen.bn, BK=chosen.bk, GROUP=GROUP, STAGES=chosen.stages,
            BIAS=bias is not None, SCALED=scale is not None, FP8=row_scale is not None,
            SWAP=chosen.swap or scale is not None,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=chosen.warps, **OPTIONS,
        )  # fmt: skip
    return out


@triton.jit
def vgemm_kernel(
    x: tl.tensor,  # [M, K]
    weight: tl.tensor,  # [N, K]
    bias: tl.tensor,  # [N]
    scale: tl.tensor,  # [N]
    row_scale: tl.tensor,  # [M]
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
    SCALED: tl.constexpr,
    FP8: tl.constexpr,
    SWAP: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Multiply the real rows. Grid ``(programs,)``, any number of them."""
    ZERO: tl.constexpr = 0 if SCALED and not FP8 else 0.0  # in the weight's own kind of number
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
        sums = tl.zeros([BN, BM], tl.float32) if SWAP else tl.zeros([BM, BN], tl.float32)
        for start in tl.range(0, K, BK, num_stages=STAGES):
            if K % BK == 0:
                left, right = tl.load(a, real, 0.0), tl.load(b, inside, ZERO)
            else:
                left = tl.load(a, real & (k < K - start)[None], 0.0)
                right = tl.load(b, inside & (k < K - start)[None], ZERO)
            if FP8:  # a tensor core keeps few bits of its sums, so they are added up in fp32 after each step
                sums = tl.dot(right, left.T, sums, max_num_imprecise_acc=BK)
            elif SWAP:
                sums = tl.dot(right.to(left.dtype), left.T, sums, input_precision=PRECISION)
            else:
                sums = tl.dot(left, right.T, sums, input_precision=PRECISION)
            a += BK
            b += BK
        if SWAP:
            sums = sums.T
        if SCALED:
            sums *= tl.load(scale + column, column < N, 0)[None]
        if FP8:
            sums *= tl.load(row_scale + row, row < limit, 0)[:, None]
        if BIAS:
            sums += tl.load(bias + column, column < N, 0).to(tl.float32)[None]
        at = out + row[:, None].to(tl.int64) * N + column[None]
        tl.store(at, sums.to(out.dtype.element_ty), real & (column < N)[None])
