"""The record head without logits in memory: the kernel that multiplies a tile of logits also reduces it.

There are three kernels. The first is a matrix product: each program computes the logits of `BM` rows and `BV` tokens in
registers, and writes their running sums, at most 28 bytes per row, 40 with second choices. The second merges the sums
of a share of the vocabulary (`record_head.SHARES`). The third makes records from the sums of all shares, which tensor
ranks exchange first.

A sum never covers more than one tile, however many tiles a program computes, and the first tile of a share begins where
the share begins. So a row's bits depend neither on the number of rows nor on the number of tensor ranks, as long as
`BV` and `BK` are the same: in a tile of any height, a warp has whole rows (on Hopper; on older GPUs all tiles have the
same height).

With one tile of rows (128), the weight is read only once. With more tiles, it is read once for every `GROUP` tiles of
rows, which run at the same time and find the weight's tile in L2. The hidden rows are read from L2 once for every tile
of the vocabulary.

Logits stay in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lopa_dist.kernels.dispatch import OPTIONS, hopper
from lopa_dist.kernels.sampling import Sampling
from lopa_dist.staging import every_row

GROUP = 16  # tiles of rows that share a tile of the vocabulary: 2,048 hidden rows fit in L2
MERGED = 2048  # numbers of one kind of sum that the merging kernel holds: 16 per thread
RECORD_ROWS = 64  # rows per program of the kernel that makes records
LOWEST = tl.constexpr(-3.4028234663852886e38)  # of tokens that are left out; finite: 0 x -inf would poison the moment
SIZES = ("count", "first", "mask_id", "share", "tiles", "all_tiles", "row_tiles", "shares")  # never specialised


@dataclass(frozen=True)
class HeadTile:
    """Sizes of a tile and of its pipeline. `bv` and `bk` affect the bits, the others only the speed."""

    bm: int
    bv: int
    bk: int
    warps: int
    stages: int


def config(rows: int, dtype: torch.dtype, noise: bool, hopper: bool) -> HeadTile:
    """Return the tile for at most `rows` rows.

    Two programs fit on one of Hopper's multiprocessors, so that one multiplies while the other reduces. fp32 is
    multiplied without tensor cores, which would round it.
    """
    if dtype == torch.float32:
        return HeadTile(64, 64, 32, 4, 2)
    if not hopper:  # how warps share rows depends on the tile's height there
        return HeadTile(128, 128, 64, 8, 3)
    if rows <= 64:
        return HeadTile(64, 128, 64, 4, 4)
    return HeadTile(128, 128, 64, 8 if noise else 4, 3)  # noise needs registers


def share_sums(
    hidden: Tensor,
    weight: Tensor,
    first: int,
    shares: int,
    mask_id: int,
    keys: Tensor | None,
    sampling: Sampling,
    rows: Tensor | None = None,
    second_choices: bool = False,
) -> Tensor:
    """Return running sums of shares of the vocabulary, of the kinds that `record_head._reduce` computes for tiles.

    Args:
        weight: ``[tokens, d]``, the tokens from id `first` on, in `shares` equal parts, each with sums of its own.
        sampling: the rules, without top-p and top-k.
        hidden, mask_id, keys, rows, second_choices: as in `record_head`.

    Returns:
        ``[7, H, shares]`` fp32; ``[10, H, shares]`` with `second_choices`.
    """
    count, size = hidden.shape
    hidden, weight = hidden.contiguous(), weight.contiguous()
    share = len(weight) // shares
    chosen = config(count, hidden.dtype, sampling.temperature > 0, hopper(hidden.device))
    tiles = triton.cdiv(share, chosen.bv)
    rows = every_row(hidden) if rows is None else rows
    kinds = 10 if second_choices else 7
    parts = hidden.new_empty(kinds, shares * tiles, count, dtype=torch.float32)
    if not count:
        return parts.new_empty(kinds, count, shares)
    wanted = wanted_sums(sampling, second_choices)
    row_tiles = triton.cdiv(count, chosen.bm)
    tile_sums_kernel[(row_tiles * shares * tiles,)](
        hidden, weight, hidden if keys is None else keys, parts, rows, count, first, mask_id, sampling.divisor,
        share, tiles, shares * tiles, row_tiles,
        K=size, BM=chosen.bm, BV=chosen.bv, BK=chosen.bk, GROUP=GROUP, STAGES=chosen.stages, **wanted,
        PRECISION="ieee" if hidden.dtype == torch.float32 else "tf32", num_warps=chosen.warps, **OPTIONS,
    )  # fmt: skip
    return merged_sums(parts, rows, shares, wanted)


def wanted_sums(sampling: Sampling, second_choices: bool) -> dict[str, bool]:
    """Return which kinds of sums kernels compute besides those that every record needs."""
    return {
        "MOMENT": sampling.confidence == "neg_entropy", "SECOND": sampling.confidence == "margin",
        "NOISE": sampling.temperature > 0, "SECOND_CHOICES": second_choices,
    }  # fmt: skip


def merged_sums(parts: Tensor, rows: Tensor, shares: int, wanted: dict[str, bool]) -> Tensor:
    """Return the sums of shares of the vocabulary, ``[7 or 10, H, shares]``, from those of their tiles.

    Args:
        parts: ``[7 or 10, shares * tiles, H]`` fp32.
        rows: as in `record_head`.
        wanted: what `wanted_sums` returned for the tiles.
    """
    kinds, all_tiles, count = parts.shape
    sums, tiles = parts.new_empty(kinds, count, shares), all_tiles // shares
    padded = triton.next_power_of_2(tiles)
    merged = max(MERGED // padded, 1)
    share_sums_kernel[(triton.cdiv(count, merged), shares)](
        parts, sums, rows, count, tiles, shares, TILES=padded, ROWS=merged, **wanted, num_warps=4, **OPTIONS
    )
    return sums


@triton.jit
def mix(x: tl.tensor) -> tl.tensor:
    """Return `random.mix` of uint64 values."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def gumbel(keys: tl.tensor, counters: tl.tensor) -> tl.tensor:
    """Return `random.gumbel`, ``keys [H]`` int64, ``counters [V]`` -> ``[H, V]`` fp32, from the same bits of a hash."""
    golden = counters.to(tl.uint64) * 0x9E3779B97F4A7C15
    bits = mix(mix(keys.to(tl.uint64))[:, None] + golden[None])
    uniform = ((bits >> 41).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2^-23
    return -tl.log(-tl.log(uniform))


@triton.jit(do_not_specialize=SIZES)
def tile_sums_kernel(
    hidden: tl.tensor,  # [H, K]
    weight: tl.tensor,  # [tokens, K]
    keys: tl.tensor,  # [H]
    parts: tl.tensor,  # [7 or 10, all tiles, H]
    rows: tl.tensor,  # [1]
    count: tl.tensor,  # H
    first: tl.tensor,  # id of the weight's first token
    mask_id: tl.tensor,
    temperature: tl.tensor,
    share: tl.tensor,  # tokens of a share
    tiles: tl.tensor,  # tiles of a share
    all_tiles: tl.tensor,
    row_tiles: tl.tensor,
    K: tl.constexpr,
    BM: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    MOMENT: tl.constexpr,
    SECOND: tl.constexpr,
    NOISE: tl.constexpr,
    SECOND_CHOICES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Compute and reduce one tile of logits per program.

    Grid ``(row tiles * tiles,)``. Programs are ordered by group of GROUP row tiles, then by tile of the vocabulary,
    then by row tile.
    """
    program = tl.program_id(0)
    group = program // (GROUP * all_tiles)
    height = tl.minimum(row_tiles - group * GROUP, GROUP)
    inner = program - group * GROUP * all_tiles
    row_tile, tile = group * GROUP + inner % height, inner // height
    limit = tl.load(rows)
    if row_tile * BM >= limit:
        return
    row = row_tile * BM + tl.arange(0, BM)
    column = tl.arange(0, BV)
    low = tile // tiles * share + tile % tiles * BV  # in the weight
    width = tl.minimum(share - tile % tiles * BV, BV)
    k = tl.arange(0, BK)
    a = hidden + row[:, None].to(tl.int64) * K + k[None]
    b = weight + (low + column)[None].to(tl.int64) * K + k[:, None]
    real, inside = (row < limit)[:, None], (column < width)[None]
    logits = tl.zeros([BM, BV], tl.float32)
    for start in tl.range(0, K, BK, num_stages=STAGES):
        if K % BK == 0:
            x, w = tl.load(a, real, 0), tl.load(b, inside, 0)
        else:
            x = tl.load(a, real & (k < K - start)[None], 0)
            w = tl.load(b, inside & (k < K - start)[:, None], 0)
        logits = tl.dot(x, w, logits, input_precision=PRECISION)
        a += BK
        b += BK

    if NOISE:
        logits = logits / temperature
    begin = first + low
    logits = tl.where(inside & (begin + column != mask_id)[None], logits, LOWEST)
    plane = all_tiles.to(tl.int64) * count
    at = parts + tile.to(tl.int64) * count + row
    store_sums(logits, begin, width, keys + row, row < limit, at, plane, MOMENT, SECOND, NOISE, SECOND_CHOICES)


@triton.jit
def store_sums(
    logits: tl.tensor,  # [BM, BV]; LOWEST where a token is left out
    begin: tl.tensor,  # id of the first of the tile's BV tokens
    width: tl.tensor,  # how many of the tokens there are
    keys: tl.tensor,  # [BM] pointers
    kept: tl.tensor,  # [BM] rows whose sums are wanted
    at: tl.tensor,  # [BM] pointers to the sums of one kind
    plane: tl.tensor,  # between kinds of sums
    MOMENT: tl.constexpr,
    SECOND: tl.constexpr,
    NOISE: tl.constexpr,
    SECOND_CHOICES: tl.constexpr,
) -> None:
    """Store the running sums of a tile's rows, of the kinds that `record_head._reduce` computes."""
    column = tl.arange(0, logits.shape[1])
    inside = (column < width)[None]
    last: tl.constexpr = logits.shape[1] - 1
    top = tl.max(logits, 1)
    index = tl.min(tl.where(logits == top[:, None], column[None], last), 1)  # on a tie, the lower id
    tl.store(at, top, kept)
    if SECOND:
        second = tl.max(tl.where(column[None] == index[:, None], LOWEST, logits), 1)
        tl.store(at + plane, second, kept)
    shifted = logits - top[:, None]
    exponential = tl.where(inside, tl.exp(shifted), 0)
    tl.store(at + 2 * plane, tl.sum(exponential, 1), kept)
    if MOMENT:
        tl.store(at + 3 * plane, tl.sum(exponential * shifted, 1), kept)
    noisy = logits
    if NOISE:
        noisy = logits + gumbel(tl.load(keys, kept, 0), begin + column)
        preference = tl.max(noisy, 1)
        index = tl.min(tl.where(noisy == preference[:, None], column[None], last), 1)
        tl.store(at + 4 * plane, preference, kept)
        tl.store(at + 5 * plane, tl.max(tl.where(column[None] == index[:, None], logits, LOWEST), 1), kept)
    chosen = tl.minimum(index, width - 1)  # a valid token, even if the row is NaN
    tl.store(at + 6 * plane, (begin + chosen).to(tl.float32), kept)  # exact up to 2^24
    if SECOND_CHOICES:
        noisy = tl.where(column[None] == index[:, None], LOWEST, noisy)
        preference = tl.max(noisy, 1)
        index = tl.min(tl.where(noisy == preference[:, None], column[None], last), 1)
        tl.store(at + 7 * plane, preference, kept)
        tl.store(at + 8 * plane, tl.max(tl.where(column[None] == index[:, None], logits, LOWEST), 1), kept)
        tl.store(at + 9 * plane, (begin + tl.minimum(index, width - 1)).to(tl.float32), kept)


@triton.jit(do_not_specialize=SIZES)
def share_sums_kernel(
    parts: tl.tensor,  # [7 or 10, shares * tiles, H]
    sums: tl.tensor,  # [7 or 10, H, shares]
    rows: tl.tensor,  # [1]
    count: tl.tensor,
    tiles: tl.tensor,
    shares: tl.tensor,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    MOMENT: tl.constexpr,
    SECOND: tl.constexpr,
    NOISE: tl.constexpr,
    SECOND_CHOICES: tl.constexpr,
) -> None:
    """Merge the sums of all tiles of a share, for ROWS rows. Grid ``(tiles of ROWS rows, shares)``."""
    share = tl.program_id(1)
    limit = tl.load(rows)
    if tl.program_id(0) * ROWS >= limit:
        return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tile = tl.arange(0, TILES)[:, None]
    kept, inside = row < limit, (tile < tiles) & (row < limit)[None]
    plane = (shares * tiles).to(tl.int64) * count
    at = parts + (share * tiles + tile).to(tl.int64) * count + row[None]
    out, out_plane = sums + row.to(tl.int64) * shares + share, count.to(tl.int64) * shares
    tops = tl.load(at, inside, LOWEST)
    totals = tl.load(at + 2 * plane, inside, 0)
    tokens = tl.load(at + 6 * plane, inside, 0)
    top = tl.max(tops, 0)
    scale = tl.exp(tops - top[None])
    best = tl.min(tl.where(tops == top[None], tile, TILES - 1), 0)  # the first tile: the lower id
    second, moment, preference, logit = top, top, top, top
    preferences, logits = tops, tops
    if SECOND:
        seconds = tl.load(at + plane, inside, LOWEST)
        second = tl.max(tl.maximum(seconds, tl.where(tile == best[None], LOWEST, tops)), 0)
    if MOMENT:
        moments = tl.load(at + 3 * plane, inside, 0)
        below = tl.maximum(tops - top[None], -1e30)  # of a tile that is left out: its product with the total is finite
        moment = tl.sum((moments + totals * below) * scale, 0)
    if NOISE:
        preferences = tl.load(at + 4 * plane, inside, LOWEST)
        preference = tl.max(preferences, 0)
        best = tl.min(tl.where(preferences == preference[None], tile, TILES - 1), 0)
        logits = tl.load(at + 5 * plane, inside, LOWEST)
        logit = tl.max(tl.where(tile == best[None], logits, LOWEST), 0)
    token = tl.max(tl.where(tile == best[None], tokens, 0), 0)
    tl.store(out, top, kept)
    tl.store(out + out_plane, second, kept)
    tl.store(out + 2 * out_plane, tl.sum(totals * scale, 0), kept)
    tl.store(out + 3 * out_plane, moment, kept)
    tl.store(out + 4 * out_plane, preference, kept)
    tl.store(out + 5 * out_plane, logit, kept)
    tl.store(out + 6 * out_plane, token, kept)
    if SECOND_CHOICES:  # the best of the other tiles' choices and this tile's second choice
        own = tile == best[None]
        preferences = tl.where(own, tl.load(at + 7 * plane, inside, LOWEST), preferences)
        logits = tl.where(own, tl.load(at + 8 * plane, inside, LOWEST), logits)
        tokens = tl.where(own, tl.load(at + 9 * plane, inside, 0), tokens)
        preference = tl.max(preferences, 0)
        best = tl.min(tl.where(preferences == preference[None], tile, TILES - 1), 0)
        own = tile == best[None]
        tl.store(out + 7 * out_plane, preference, kept)
        tl.store(out + 8 * out_plane, tl.max(tl.where(own, logits, LOWEST), 0), kept)
        tl.store(out + 9 * out_plane, tl.max(tl.where(own, tokens, 0), 0), kept)


def merged_records(sums: Tensor, confidence: str) -> Tensor:
    """Return records ``[H, 3 or 5]``, as `record_head` does, from the sums of all shares of the vocabulary.

    Args:
        sums: ``[7 or 10, H, shares]``.
        confidence: `Sampling.confidence`.
    """
    kinds, count, shares = sums.shape
    sums = sums.contiguous()
    records = sums.new_empty(count, 5 if kinds > 7 else 3, dtype=torch.int32)
    if count:
        records_kernel[(triton.cdiv(count, RECORD_ROWS),)](
            sums, records, count, shares, SHARES=triton.next_power_of_2(shares), ROWS=RECORD_ROWS,
            CONFIDENCE=confidence, SECOND_CHOICES=kinds > 7, num_warps=4, **OPTIONS,
        )  # fmt: skip
    return records


@triton.jit(do_not_specialize=("count", "shares"))
def records_kernel(
    sums: tl.tensor,  # [7 or 10, count, shares]
    records: tl.tensor,  # [count, 3 or 5]
    count: tl.tensor,
    shares: tl.tensor,
    SHARES: tl.constexpr,
    ROWS: tl.constexpr,
    CONFIDENCE: tl.constexpr,
    SECOND_CHOICES: tl.constexpr,
) -> None:
    """Make the records of ROWS rows. Grid ``(tiles of ROWS rows,)``.

    On equal preference the lower id wins, which is in the earlier share.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    share = tl.arange(0, SHARES)[None]
    kept = row < count
    inside = kept[:, None] & (share < shares)
    plane = count.to(tl.int64) * shares
    at = sums + row[:, None].to(tl.int64) * shares + share
    tops = tl.load(at, inside, LOWEST)
    totals = tl.load(at + 2 * plane, inside, 0)
    preferences = tl.load(at + 4 * plane, inside, LOWEST)
    logits = tl.load(at + 5 * plane, inside, LOWEST)
    tokens = tl.load(at + 6 * plane, inside, 0)
    top = tl.max(tops, 1)
    scale = tl.exp(tops - top[:, None])
    total = tl.sum(totals * scale, 1)
    own = share == first_greatest(preferences, share, SHARES)[:, None]
    probability = tl.exp(tl.max(tl.where(own, logits, LOWEST), 1) - top) / total
    confidence = probability
    if CONFIDENCE == "margin":
        seconds = tl.load(at + plane, inside, LOWEST)
        of_top = share == first_greatest(tops, share, SHARES)[:, None]
        second = tl.max(tl.maximum(seconds, tl.where(of_top, LOWEST, tops)), 1)
        confidence = (1 - tl.exp(second - top)) / total
    if CONFIDENCE == "neg_entropy":
        moments = tl.load(at + 3 * plane, inside, 0)
        moment = tl.sum((moments + totals * (tops - top[:, None])) * scale, 1)
        confidence = moment / total - tl.log(total)
    out = records + row.to(tl.int64) * (5 if SECOND_CHOICES else 3)
    tl.store(out, tl.max(tl.where(own, tokens, 0), 1).to(tl.int32), kept)
    tl.store(out + 1, probability.to(tl.int32, bitcast=True), kept)
    tl.store(out + 2, confidence.to(tl.int32, bitcast=True), kept)
    if SECOND_CHOICES:  # the best of the other shares' choices and this share's second choice
        preferences = tl.where(own, tl.load(at + 7 * plane, inside, LOWEST), preferences)
        logits = tl.where(own, tl.load(at + 8 * plane, inside, LOWEST), logits)
        tokens = tl.where(own, tl.load(at + 9 * plane, inside, 0), tokens)
        own = share == first_greatest(preferences, share, SHARES)[:, None]
        probability = tl.exp(tl.max(tl.where(own, logits, LOWEST), 1) - top) / total
        tl.store(out + 3, tl.max(tl.where(own, tokens, 0), 1).to(tl.int32), kept)
        tl.store(out + 4, probability.to(tl.int32, bitcast=True), kept)


@triton.jit
def first_greatest(x: tl.tensor, column: tl.tensor, COLUMNS: tl.constexpr) -> tl.tensor:
    """Return, for each row of ``x [R, COLUMNS]``, the first column with its greatest number."""
    return tl.min(tl.where(x == tl.max(x, 1)[:, None], column, COLUMNS - 1), 1)
