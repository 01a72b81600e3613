"""Segments cut into tiles: the units of work of meta-attention (XY-Serve's task decomposition and reordering).

A tile is a run of query rows, its cached ranges and its own columns; a table of them is all that a kernel needs to
know about prompts, windows and branches. Rows of one K/V head's query heads lie on top of each other in a tile, so a
tile of `tile_rows` rows is a matrix of ``tile_rows x heads_per_kv`` rows. Made on the host once per forward, without a
Python loop over segments; every layer uses it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lopa_dist.kernels.segment_attention import Segments
from lopa_dist.ragged import UNBOUNDED, Ints, ragged_arange

Ints32 = NDArray[np.int32]
FIELDS = 10  # of a tile in the table
# Time of a tile's matrix row by the tile's height, where 128 rows are 1: lower tiles read K/V more often and, below
# 64 rows, do without Hopper's wide matrix instructions. Reckoned, not measured.
ROW_COST = {128: 1.0, 64: 1.08, 32: 1.6, 16: 3.0}


@dataclass
class Tiles:
    """Work for one forward, longest tiles first.

    Own columns are numbered like the packed rows: the K/V of packed row r lie in pool slot ``scratch + r``.
    """

    # [T, 10] q0, rows, s0_base, s0_len, s1_base, s1_len, c0, c1, part (-1: writes its rows itself), and how many cached
    # columns of its segments lie before s0
    table: Ints32
    seen: Ints32  # [R] cached columns each packed row sees; more than there are: all
    lo: Ints32  # [R] first own column each packed row sees: the first of its segment
    hi: Ints32  # [R] the one behind the last; both 0 where a row is in no segment
    depth: Ints32  # [R] it sees no column whose `until` is not above that
    until: Tensor | None  # [R] on the device; None: every column is seen at all depths
    merges: Ints32  # [N, 4] q0, rows, first_part, parts: rows whose result is made of parts
    parts: int  # of all merges
    scratch: int  # pool slot of packed row 0
    tile_rows: int  # most rows of a tile


@dataclass(frozen=True)
class Split:
    """How the tiles of low stacks are split along their columns, into parts that are merged afterwards.

    With few sequences this gives a GPU more to do at a time. A stack's tiles have at most `parts` parts together, which
    bounds their memory. Tiles of a tall stack are work enough: they are not split, however many columns they see. Nor
    are tiles of a stack without cached tokens, which sees no more columns than it has rows.
    """

    parts: int  # 2 or more
    columns: int = 128  # a part has a multiple of this, the last part of a tile the rest


@dataclass(frozen=True)
class Capacity:
    """How many of each a table has room for."""

    tiles: int
    merges: int
    parts: int


def tile(segments: Segments, tile_rows: int, split: Split | None = None, stacked: bool = True) -> Tiles:
    """Cut segments into tiles of at most `tile_rows` rows.

    Adjacent segments that see the same cached tokens are one stack: a tile may hold rows of several, and every tile
    reads the cached K/V once for all of its rows. The branches of a sequence are a stack, and so is what lies side by
    side of several sequences whose prompts begin alike and sees that beginning and nothing else: the rests of their
    prompts, or windows behind a prompt that is all the same.

    How tiles are cut depends on their own stack alone, so a stack's results do not depend on the rest of the batch. A
    row's do depend, to rounding, on the other rows of its stack: on other sequences, where they share a beginning.

    Args:
        segments: in any order; the own K/V of every segment must lie in pool slots of packed order.
        tile_rows: most query rows of a tile, see `tile_rows_for`.
        split: how low stacks are split along their columns. None: never.
        stacked: False makes every segment a stack of its own: a branch's bits then do not depend on its siblings. So
            they are where rows see a part of the cached tokens (`Segments.seen`).

    Raises:
        ValueError: own K/V that do not lie in packed order.
    """
    offset = (segments.own_base - segments.start)[segments.rows > 0]
    if (offset != offset[:1]).any():
        raise ValueError("tiles need own_base = scratch + start for every segment, with one scratch for all of them")
    order, view, first = stacks(segments, stacked)
    start, rows = segments.start[order], segments.rows[order]
    own_start = np.repeat(start, rows)
    row = np.arange(len(own_start)) + np.repeat(start - np.cumsum(rows) + rows, rows)
    lo, hi = np.zeros((2, len(segments.hi)), np.int64)
    depth, until = segments.drafts or (np.zeros_like(hi), None)
    cached_seen = np.full(len(segments.hi), UNBOUNDED)
    if segments.seen is not None:
        cached_seen[row] = segments.seen[row]
    lo[row] = own_start
    hi[row] = segments.hi[row] + own_start

    # tiles of the rows of stacks
    height = np.add.reduceat(rows, first) if len(first) else rows
    count = -(-height // tile_rows)
    stack = np.repeat(np.arange(len(first)), count)
    q0 = start[first][stack] + ragged_arange(count) * tile_rows
    n = np.minimum(start[first][stack] + height[stack] - q0, tile_rows)
    c0 = lo[q0]  # segments start in ascending order
    c1 = np.maximum.reduceat(hi, q0) if len(q0) else q0  # rows between tiles have hi = 0
    s0_base, s0, s1_base, s1 = view[:, first][:, stack]

    # parts of their columns
    columns = s0 + s1 + c1 - c0
    width = seen = np.maximum(columns, 1)
    if split is not None:
        most = np.where(s0 + s1 > 0, np.maximum(split.parts // count[stack], 1), 1)
        width = -(-seen // (most * split.columns)) * split.columns
    pieces = -(-seen // width)
    of = np.repeat(np.arange(len(pieces)), pieces)
    begin = ragged_arange(pieces) * width[of]
    end = np.minimum(begin + width[of], columns[of])
    s0_cut, s1_cut, own_cut = (
        np.clip(np.stack([begin, end]) - before[of], 0, length[of])
        for before, length in ((np.zeros_like(s0), s0), (s0, s1), (s0 + s1, c1 - c0))
    )
    in_parts = pieces > 1
    parts = pieces * in_parts
    first_part = np.cumsum(parts) - parts
    part = np.where(in_parts[of], first_part[of] + ragged_arange(pieces), -1)
    table = np.stack([
        q0[of], n[of],
        s0_base[of] + s0_cut[0], s0_cut[1] - s0_cut[0],
        s1_base[of] + s1_cut[0], s1_cut[1] - s1_cut[0],
        c0[of] + own_cut[0], c0[of] + own_cut[1], part, begin,
    ], axis=1)  # fmt: skip
    longest_first = np.argsort(begin - end, kind="stable")  # stable: siblings stay adjacent and meet in the L2 cache
    merges = np.stack([q0, n, first_part, pieces], axis=1)[in_parts]
    return Tiles(
        table[longest_first].astype(np.int32), cached_seen.astype(np.int32), lo.astype(np.int32),
        hi.astype(np.int32), depth.astype(np.int32), until, merges.astype(np.int32), int(parts.sum()),
        int(offset[0]) if len(offset) else 0, tile_rows,
    )  # fmt: skip


def stacks(segments: Segments, stacked: bool) -> tuple[Ints, Ints, Ints]:
    """Segments in packed order, and which of them begin a stack.

    Returns:
        The order ``[G]``, without segments of no rows; what each then sees, ``[4, G]``: base and length of both cached
        ranges; and the first segment of each stack.
    """
    order = np.argsort(segments.start, kind="stable")
    order = order[segments.rows[order] > 0]
    start, rows = segments.start[order], segments.rows[order]
    nothing = np.zeros_like(segments.start)
    tail_base, tail = segments.tail or (nothing, nothing)
    view = np.stack([segments.shared_base, segments.shared, tail_base, tail])[:, order]
    view[::2] *= view[1::2] > 0  # where an empty range lies says nothing
    together = (start[1:] == start[:-1] + rows[:-1]) & (view[:, 1:] == view[:, :-1]).all(0)
    together &= stacked & (view[1, 1:] + view[3, 1:] > 0)  # without cached tokens there is nothing to share
    together &= segments.seen is None  # where rows are bounded, own columns go on behind the cached ones
    first = np.flatnonzero(np.concatenate([np.ones(min(len(rows), 1), bool), ~together]))
    return order, view, first


def tile_rows_for(heads_per_kv: int, stack_rows: int) -> int:
    """Rows of a tile that suit stacks of `stack_rows` rows: the cheapest of the heights 16 to 128 of the matrix.

    Four branches of 32 rows with one query head per K/V head are exactly one tile of 128 rows.

    Raises:
        ValueError: more query heads per K/V head than the highest tile has rows.
    """
    if heads_per_kv > max(ROW_COST):
        raise ValueError(f"{heads_per_kv} query heads per K/V head: meta-attention takes at most {max(ROW_COST)}")
    heights = [height for height in ROW_COST if height >= heads_per_kv]
    cost = {h: -(-stack_rows // (h // heads_per_kv)) * h * ROW_COST[h] for h in heights}
    return min(heights, key=lambda height: cost[height]) // heads_per_kv


def capacity(
    rows: int, stacks: int, tile_rows: int, split: Split | None = None, low: int = 0, cached: int = 0, own: int = 0
) -> Capacity:
    """What a table needs to hold any `tile` of that size.

    Args:
        rows: packed rows in segments.
        stacks: stacks among them; where segments are not stacked, segments.
        tile_rows, split: as in `tile`.
        low: stacks among them that may be split: those with cached tokens.
        cached: most cached tokens a segment sees, both ranges together.
        own: most rows of a segment.
    """
    stacks = min(stacks, rows)
    tiles = (rows - stacks) // tile_rows + stacks
    columns = cached + 2 * own + tile_rows  # a tile that begins and ends within segments sees all of their columns
    if split is None or columns <= split.columns:
        return Capacity(tiles, 0, 0)
    parts = min(low, stacks) * split.parts
    return Capacity(tiles + parts, min(tiles, parts // 2), parts)


def matrix_rows(tile_rows: int, heads_per_kv: int) -> int:
    """Height of the matrix that holds a tile: a power of two, 16 or more."""
    return max(16, 1 << (tile_rows * heads_per_kv - 1).bit_length())
