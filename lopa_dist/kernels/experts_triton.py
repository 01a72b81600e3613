"""Products of grouped rows with their experts' weights, with groups read from the device; and the sum for each row.

A program computes the outputs of one tile of rows, all of one expert, for one tile of columns. All column tiles of a
row tile follow each other, and then those of the expert's next row tile, so they share the expert's weight in L2. In
`virtual_gemm_triton`, an int8 weight is the left operand of the product. Here every weight is the left operand, because
a group may have few rows, and Hopper's instructions need a tall left operand. The loop over K is the same for every
row, so a row's bits do not depend on other rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lopa_dist.kernels.dispatch import OPTIONS, processors, shared_memory
from lopa_dist.kernels.virtual_gemm_triton import GemmTile, fitting

# by the height of the groups' tiles; all of one kind have the same `bk`
HALF = {16: GemmTile(16, 64, 64, 4, 6, 4), 64: GemmTile(64, 128, 64, 4, 4, 2)}
INT8 = {16: GemmTile(16, 64, 128, 4, 4, 4), 64: GemmTile(64, 64, 128, 4, 3, 2)}
SUMMED = 1024  # columns per program of the sum: 8 per thread
FP32 = {16: GemmTile(16, 64, 32, 4, 4, 4), 64: GemmTile(64, 64, 32, 4, 3, 2)}


def tile_for(x: torch.dtype, weight: torch.dtype, height: int, room: int) -> GemmTile:
    """Return the tile of a product, with stages that fit in `room` bytes of shared memory."""
    kinds = FP32 if x == torch.float32 else INT8 if weight == torch.int8 else HALF
    return fitting(kinds[height], x.itemsize, weight.itemsize, room)


def expert_linear(x: Tensor, weight: Tensor, scale: Tensor | None, ends: Tensor, height: int) -> Tensor:
    """Compute `experts.expert_linear` for groups of whole tiles of `height` rows; rows after them are undefined."""
    x, weight = x.contiguous(), weight.contiguous()
    (rows, k), (count, n, _) = x.shape, weight.shape
    out = x.new_empty(rows, n)
    if rows:
        tile = tile_for(x.dtype, weight.dtype, height, shared_memory(x.device))
        programs = min(-(-rows // height) * -(-n // tile.bn), tile.resident * processors(x.device))
        expert_kernel[(programs,)](
            x, weight, x if scale is None else scale.contiguous(), out, ends,
            E=count, E_BLOCK=triton.next_power_of_2(count), N=n, K=k, BM=height, BN=tile.bn, BK=tile.bk,
            STAGES=tile.stages, SCALED=scale is not None, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            num_warps=tile.warps, **OPTIONS,
        )  # fmt: skip
    return out


def weighted_sum(x: Tensor, place: Tensor, weights: Tensor) -> Tensor:
    """Compute `experts.weighted_sum` from `Groups.place`, with the same bits, reading each grouped row once."""
    x, (rows, chosen), size = x.contiguous(), place.shape, x.shape[1]
    out = x.new_empty(rows, size)
    if rows:
        block = min(SUMMED, triton.next_power_of_2(size))
        # without fused multiply-add, because torch's operators round in between
        sum_kernel[(rows, triton.cdiv(size, block))](
            x, place, weights, out, CHOSEN=chosen, SIZE=size, BLOCK=block, num_warps=4,
            **{**OPTIONS, "enable_fp_fusion": False},
        )  # fmt: skip
    return out


@triton.jit
def sum_kernel(
    x: tl.tensor,  # [P, SIZE]
    place: tl.tensor,  # [R, CHOSEN]
    weights: tl.tensor,  # [R, CHOSEN]
    out: tl.tensor,  # [R, SIZE]
    CHOSEN: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Sum the weighted outputs of one row's experts. Grid ``(R, tiles of BLOCK columns)``."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(CHOSEN):
        at = tl.load(place + row * CHOSEN + j).to(tl.int64) * SIZE
        weight = tl.load(weights + row * CHOSEN + j).to(tl.float32)
        total += tl.load(x + at + column, inside, 0).to(tl.float32) * weight
    tl.store(out + row * SIZE + column, total.to(out.dtype.element_ty), inside)


@triton.jit
def expert_kernel(
    x: tl.tensor,  # [P, K]
    weight: tl.tensor,  # [E, N, K]
    scale: tl.tensor,  # [E, N]
    out: tl.tensor,  # [P, N]
    ends: tl.tensor,  # [E] the end of each expert's rows, in whole tiles
    E: tl.constexpr,
    E_BLOCK: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Multiply row tiles with their expert's weight. Grid ``(programs,)``, any number of them."""
    expert = tl.arange(0, E_BLOCK)
    end = tl.load(ends + expert, expert < E, 2147483647)
    column_tiles: tl.constexpr = (N + BN - 1) // BN
    tiles = tl.load(ends + E - 1) // BM * column_tiles
    k = tl.arange(0, BK)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        first = tile // column_tiles * BM
        row = first + tl.arange(0, BM)
        column = tile % column_tiles * BN + tl.arange(0, BN)
        of_expert = tl.sum((end <= first).to(tl.int32)).to(tl.int64) * N
        a = x + row[:, None].to(tl.int64) * K + k[None]
        b = weight + (of_expert + column)[:, None] * K + k[None]
        inside = column < N
        sums = tl.zeros([BN, BM], tl.float32)
        for start in tl.range(0, K, BK, num_stages=STAGES):
            if K % BK == 0:
                left, right = tl.load(a), tl.load(b, inside[:, None], 0)
            else:
                left = tl.load(a, (k < K - start)[None], 0)
                right = tl.load(b, inside[:, None] & (k < K - start)[None], 0)
            sums = tl.dot(right.to(left.dtype), left.T, sums, input_precision=PRECISION)
            a += BK
            b += BK
        if SCALED:
            sums = sums * tl.load(scale + of_expert + column, inside, 0)[:, None]
        tl.store(out + row[:, None].to(tl.int64) * N + column[None], sums.T.to(out.dtype.element_ty), inside[None])
