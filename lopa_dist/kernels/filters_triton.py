"""Top-p and top-k on a GPU, without sorting: rows of logits are filtered in place, and then reduced to running sums.

A filter keeps the logits that are not below a threshold. The threshold is found bit by bit: it lies above a candidate
if enough logits, or enough mass, lie above the candidate. Each pass over a row compares three candidates and settles
two bits, so 16 passes find the threshold of a filter exactly. With one filter, these kernels read and write about 100
bytes per logit; torch's operators, a sort among them, would read and write 444.

One program filters a row, so the row's bits depend on nothing else.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lopa_dist.kernels.dispatch import OPTIONS
from lopa_dist.kernels.record_head_triton import LOWEST, merged_sums, store_sums, wanted_sums
from lopa_dist.kernels.sampling import Sampling

COLUMNS, WARPS = 8192, 32  # logits of a row that a program holds, 8 per thread; one program per multiprocessor
BM, BV = 16, 256  # rows and tokens of a tile of the kernel that reduces; BV affects the bits
PASSES = tl.constexpr(16)


def filtered_sums(
    logits: Tensor, mask_id: int, keys: Tensor, sampling: Sampling, rows: Tensor, second_choices: bool
) -> Tensor:
    """Return running sums ``[7 or 10, R, 1]`` of logits ``[R, V]`` after temperature and filters; overwrites them.

    Args:
        logits: fp32.
        mask_id, keys, sampling, second_choices: as in `record_head`.
        rows: ``[1]`` int32, how many of the R rows are real.
    """
    count, width = logits.shape
    filter_kernel[(count,)](
        logits, rows, width, mask_id, sampling.divisor, sampling.top_p, sampling.top_k,
        TOP_P=sampling.top_p < 1, TOP_K=0 < sampling.top_k < width, COLUMNS=COLUMNS, num_warps=WARPS, **OPTIONS,
    )  # fmt: skip
    tiles, wanted = triton.cdiv(width, BV), wanted_sums(sampling, second_choices)
    parts = logits.new_empty(10 if second_choices else 7, tiles, count)
    logit_sums_kernel[(triton.cdiv(count, BM), tiles)](
        logits, keys, parts, rows, count, width, BM=BM, BV=BV, **wanted, num_warps=4, **OPTIONS
    )
    return merged_sums(parts, rows, 1, wanted)


@triton.jit
def ordered(x: tl.tensor) -> tl.tensor:
    """Return int32 in the order of the fp32 numbers; 0 and -0 are equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def threshold(
    logits: tl.tensor,
    width: tl.tensor,
    least: tl.tensor,
    top: tl.tensor,
    enough: tl.tensor,
    MASS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Return the greatest int32 t such that logits x with ``ordered(x) >= t`` are more than `enough`.

    They are counted as tokens or, with `MASS`, by their mass relative to that of `top`; logits below `least` have no
    mass. If there is no such t, return the least int32.
    """
    low = tl.full([], -(2**31), tl.int64)
    quarter = tl.full([], 2**30, tl.int64)
    for _ in range(PASSES):
        first, second, third = low + quarter, low + 2 * quarter, low + 3 * quarter
        above_first = tl.zeros([COLUMNS], tl.float32)
        above_second = tl.zeros([COLUMNS], tl.float32)
        above_third = tl.zeros([COLUMNS], tl.float32)
        for begin in range(0, width, COLUMNS):
            token = begin + tl.arange(0, COLUMNS)
            x = tl.load(logits + token, token < width, LOWEST)
            at = ordered(x)
            weight = tl.where(token < width, 1.0, 0.0)
            if MASS:
                weight = tl.where((token < width) & (at >= least), tl.exp(x - top), 0.0)
            above_first += tl.where(at >= first.to(tl.int32), weight, 0.0)
            above_second += tl.where(at >= second.to(tl.int32), weight, 0.0)
            above_third += tl.where(at >= third.to(tl.int32), weight, 0.0)
        low = tl.where(tl.sum(above_first) > enough, first, low)
        low = tl.where(tl.sum(above_second) > enough, second, low)
        low = tl.where(tl.sum(above_third) > enough, third, low)
        quarter = quarter // 4
    return low.to(tl.int32)


@triton.jit(do_not_specialize=("width", "mask_id", "top_k"))
def filter_kernel(
    logits: tl.tensor,  # [R, V]
    rows: tl.tensor,  # [1]
    width: tl.tensor,  # V
    mask_id: tl.tensor,
    temperature: tl.tensor,
    top_p: tl.tensor,
    top_k: tl.tensor,
    TOP_P: tl.constexpr,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Apply temperature and filters to a row of logits per program, as `record_head.filter_logits` does; grid ``(R,)``.

    Top-k comes first: the mass of top-p is that of the k tokens.
    """
    row = tl.program_id(0)
    if row >= tl.load(rows):
        return
    logits += row.to(tl.int64) * width
    greatest = tl.full([COLUMNS], LOWEST, tl.float32)
    for begin in range(0, width, COLUMNS):
        token = begin + tl.arange(0, COLUMNS)
        x = tl.load(logits + token, token < width, LOWEST) / temperature
        x = tl.where((token < width) & (token != mask_id), x, LOWEST)
        tl.store(logits + token, x, token < width)
        greatest = tl.maximum(greatest, x)
    top = tl.max(greatest, 0)
    tl.debug_barrier()  # later passes read what this one has written
    least = tl.full([], -(2**31), tl.int32)
    if TOP_K:
        few = top_k.to(tl.float32) - 0.5  # k tokens are more than this
        least = threshold(logits, width, least, top, few, False, COLUMNS)
    if TOP_P:
        mass = tl.zeros([COLUMNS], tl.float32)
        for begin in range(0, width, COLUMNS):
            token = begin + tl.arange(0, COLUMNS)
            x = tl.load(logits + token, token < width, LOWEST)
            mass += tl.where((token < width) & (ordered(x) >= least), tl.exp(x - top), 0.0)
        enough = top_p * tl.sum(mass)
        least = tl.maximum(least, threshold(logits, width, least, top, enough, True, COLUMNS))
    for begin in range(0, width, COLUMNS):
        token = begin + tl.arange(0, COLUMNS)
        x = tl.load(logits + token, token < width, LOWEST)
        tl.store(logits + token, tl.where(ordered(x) >= least, x, LOWEST), token < width)


@triton.jit(do_not_specialize=("count", "width"))
def logit_sums_kernel(
    logits: tl.tensor,  # [R, V]
    keys: tl.tensor,  # [R]
    parts: tl.tensor,  # [7 or 10, tiles, R]
    rows: tl.tensor,  # [1]
    count: tl.tensor,  # R
    width: tl.tensor,  # V
    BM: tl.constexpr,
    BV: tl.constexpr,
    MOMENT: tl.constexpr,
    SECOND: tl.constexpr,
    NOISE: tl.constexpr,
    SECOND_CHOICES: tl.constexpr,
) -> None:
    """Reduce a tile of filtered logits per program. Grid ``(tiles of BM rows, tiles of BV tokens)``."""
    limit = tl.load(rows)
    if tl.program_id(0) * BM >= limit:
        return
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    tile, begin = tl.program_id(1), tl.program_id(1) * BV
    token, kept = begin + tl.arange(0, BV), row < limit
    at = logits + row[:, None].to(tl.int64) * width + token[None]
    x = tl.load(at, kept[:, None] & (token < width)[None], LOWEST)
    plane = tl.num_programs(1).to(tl.int64) * count
    to = parts + tile.to(tl.int64) * count + row
    store_sums(x, begin, width - begin, keys + row, kept, to, plane, MOMENT, SECOND, NOISE, SECOND_CHOICES)
