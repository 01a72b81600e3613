"""Segments cut into tiles: the units of work of meta-attention (task decomposition of XY-Serve, arXiv 2412.18106).

A tile is a run of query rows, with its cached ranges and its own columns. A table of tiles tells a kernel all it needs
to know about prompts, windows and branches. A tile stacks the rows of all query heads of one K/V head, so a tile of
`tile_rows` rows is a matrix of ``tile_rows x heads_per_kv`` rows. The host makes the table once per forward, without a
Python loop over segments; every layer uses it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lopa_dist.kernels.segment_attention import Segments
from lopa_dist.ragged import UNBOUNDED, Ints, ragged_arange

Ints32 = NDArray[np.int32]
FIELDS, MERGE_FIELDS = 12, 6  # per tile in the table, and per merge of parts
MOST_ROWS = 1024  # of a forward whose table is kept: larger forwards vary
MOST_ROWS_KEPT = 2**18  # of all forwards whose tables are kept, about 40 bytes per row
# Time per row of a tile's matrix, by the tile's height, relative to 128 rows: lower tiles read K/V more often and,
# below 64 rows, cannot use Hopper's wide matrix instructions. On an H200, 64 rows take 0.95 to 1.05 of the time of 128;
# the others are estimated.
ROW_COST = {128: 1.0, 64: 1.0, 32: 1.6, 16: 3.0}
CAUSAL_HEIGHT = 64  # of the matrix of a causal model's tile


@dataclass
class Tiles:
    """Work for one forward, longest tiles first.

    Own columns are numbered as packed rows are: the K/V of packed row r are in pool slot ``scratch + r``.
    """

    # [T, 12] q0: its first row; rows; s0_base, s0_len, s1_base, s1_len: first slot and length of both cached ranges;
    # c0, c1: its first own column and one past the last; part (-1: the tile writes its rows itself); how many columns
    # of its segments come before it; how many of its rows begin at q0; and where the others begin
    table: Ints32
    seen: Ints32  # [R] how many cached columns each packed row sees; more than there are: all
    lo: Ints32  # [R] first own column that each packed row sees: the first of its segment
    hi: Ints32  # [R] one past the last; both are 0 for a row in no segment
    depth: Ints32  # [R] each packed row only sees columns whose `until` is above this
    until: Tensor | None  # [R] on the device; None: every column is seen at all depths
    # [N, 6] q0, rows, first_part, parts, and the last two of the table: rows whose result is merged from parts
    merges: Ints32
    parts: int  # number of parts of all merges
    scratch: int  # pool slot of packed row 0
    tile_rows: int  # most rows of a tile


@dataclass(frozen=True)
class Split:
    """How the tiles of low stacks are split along their columns, into parts that are merged afterwards.

    With few sequences this gives a GPU more work to do at the same time. The tiles of a stack have at most `parts`
    parts together, which bounds their memory. Tiles of a tall stack are enough work: they are not split, however many
    columns they see. Nor are tiles of a stack without cached tokens, which sees no more columns than it has rows.
    """

    parts: int  # 2 or more
    columns: int = 128  # each part has a multiple of this, except a tile's last part
    room: int | None = None  # limit on the parts of all stacks of a forward; None: only `parts` for each


@dataclass(frozen=True)
class Capacity:
    """How many tiles, merges and parts a table has room for."""

    tiles: int
    merges: int
    parts: int


@dataclass(frozen=True)
class Cut:
    """How rows are cut into tiles, before these are split along their columns: [T] per tile, [R] per row."""

    lo: Ints32  # [R] as in `Tiles`
    hi: Ints32  # [R]
    depth: Ints32  # [R]
    q0: Ints  # [T] first row
    rows: Ints  # [T] number of rows
    c0: Ints  # [T] first own column
    own: Ints  # [T] number of own columns
    segment: Ints  # [T] first segment of its stack, in packed order
    siblings: Ints  # [T] number of tiles of its stack
    view: Ints  # [4, T] base and length of both cached ranges
    first: Ints  # [T] how many of its rows begin at q0
    q1: Ints  # [T] where the other rows begin


def tile(
    segments: Segments,
    tile_rows: int,
    split: Split | None = None,
    stacked: bool = True,
    kept: KeptTiles | None = None,
) -> Tiles:
    """Return segments cut into tiles of at most `tile_rows` rows.

    Adjacent segments that see the same cached tokens are one stack: a tile may hold rows of several of them, and reads
    the cached K/V once for all its rows. The branches of a sequence are a stack. So are adjacent segments of several
    sequences whose prompts begin alike, if they see that beginning and no other cached tokens: the rests of their
    prompts, or windows after prompts that are equal.

    How a stack is cut does not depend on the rest of the batch, unless `Split.room` limits its parts, so its results do
    not either. A row's results do depend, to rounding, on the other rows of its stack: on other sequences, where they
    share a beginning.

    Args:
        segments: in any order; the own K/V of every segment must be in pool slots of packed order.
        tile_rows: maximum query rows per tile, see `tile_rows_for`.
        split: how low stacks are split along their columns. None: never.
        stacked: False makes every segment a stack of its own, as `Segments.seen` always does: a branch's bits then do
            not depend on its siblings.
        kept: tiles of earlier calls with the same `tile_rows`, `split` and `stacked`; updated. None: nothing is kept.

    Raises:
        ValueError: own K/V are not in packed order.
    """
    if kept is None or len(segments.hi) > MOST_ROWS or segments.seen is not None:
        return tiles_of(segments, tile_rows, split, stacked)
    depth, until = segments.drafts or (None, None)
    key = as_bytes(
        segments.start, segments.rows, segments.hi, depth, segments.shared_base, segments.shared, segments.own_base,
        *(segments.tail or ()),
    )  # fmt: skip
    found = kept.tiles.get(key)
    if found is None:
        found = kept.put(key, replace(tiles_of(segments, tile_rows, split, stacked), until=None))
    return found if until is None else replace(found, until=until)


def as_bytes(*arrays: Ints | None) -> tuple[bytes, ...]:
    """Return the arrays' bytes, as a key."""
    return tuple([b"" if array is None else array.tobytes() for array in arrays])


class KeptTiles:
    """Tiles of earlier forwards, which steps of few sequences often need again.

    All are dropped before the forwards have more than `MOST_ROWS_KEPT` rows together.
    """

    def __init__(self) -> None:
        self.tiles: dict[tuple[bytes, ...], Tiles] = {}
        self.rows = 0

    def put(self, key: tuple[bytes, ...], tiles: Tiles) -> Tiles:
        """Keep tiles under `key`, and return them."""
        if self.rows + len(tiles.hi) > MOST_ROWS_KEPT:
            self.tiles.clear()
            self.rows = 0
        self.rows += len(tiles.hi)
        self.tiles[key] = tiles
        return tiles


def tiles_of(segments: Segments, tile_rows: int, split: Split | None, stacked: bool) -> Tiles:
    """Return the tiles that `tile` describes, with its arguments: cut in C, or by numpy where there is no compiler."""
    from lopa_dist.kernels import c_tiles

    in_c = not isinstance(c_tiles.found(), str)
    return (c_tiles.tiles_of if in_c else tiles_of_plain)(segments, tile_rows, split, stacked)


def unordered() -> ValueError:
    """Return the error for own K/V that are not in packed order."""
    return ValueError("tiles need own_base = scratch + start for every segment, with one scratch for all of them")


def tiles_of_plain(segments: Segments, tile_rows: int, split: Split | None, stacked: bool) -> Tiles:
    """Return the tiles that `tile` describes, cut by numpy."""
    order, view, first = stacks(segments, stacked)
    offset = (segments.own_base - segments.start)[order]
    if (offset != offset[:1]).any():
        raise unordered()
    made = cut(segments, order, view, first, tile_rows)
    if segments.seen is not None:
        made = paired(as_far_as_seen(made, segments.seen), tile_rows)
    seen = np.full(len(segments.hi), UNBOUNDED, np.int32) if segments.seen is None else segments.seen.astype(np.int32)

    # split the tiles' columns into parts
    s0_base, s0, s1_base, s1 = made.view
    cached = s0 + s1
    columns = cached + made.own
    width = least = np.maximum(columns, 1)
    if split is not None:
        of_stack = split.parts
        if split.room is not None:  # where rows are bounded, each segment is a stack, and there are many
            sharing = int((view[1, first] + view[3, first] > 0).sum())
            of_stack = min(of_stack, split.room // max(sharing, 1))
        most = np.where(cached > 0, np.maximum(of_stack // made.siblings, 1), 1)
        width = -(-least // (most * split.columns)) * split.columns
    pieces = -(-least // width)
    of = np.repeat(np.arange(len(pieces)), pieces)
    number = ragged_arange(pieces)
    begin = number * width[of]
    end = np.minimum(begin + width[of], columns[of])
    ranges = np.array([np.zeros_like(s0), s0, cached, s0, s1, made.own])[:, of]
    before, length = ranges[:3], ranges[3:]
    low, high = (np.minimum(np.maximum(at - before, 0), length) for at in (begin, end))
    in_parts = pieces > 1
    parts = pieces * in_parts
    first_part = np.cumsum(parts) - parts
    longest_first = np.argsort(begin - end, kind="stable")  # stable: siblings stay adjacent and share the L2 cache
    table = np.array([
        made.q0[of], made.rows[of],
        s0_base[of] + low[0], high[0] - low[0],
        s1_base[of] + low[1], high[1] - low[1],
        made.c0[of] + low[2], made.c0[of] + high[2],
        np.where(in_parts[of], first_part[of] + number, -1), begin,
        made.first[of], made.q1[of],
    ], np.int32)[:, longest_first]  # fmt: skip
    until = None if segments.drafts is None else segments.drafts[1]
    merges = np.stack([made.q0, made.rows, first_part, pieces, made.first, made.q1], axis=1)[in_parts]
    return Tiles(
        table.T, seen, made.lo, made.hi, made.depth, until, merges.astype(np.int32), int(parts.sum()),
        int(offset[0]) if len(offset) else 0, tile_rows,
    )  # fmt: skip


def cut(segments: Segments, order: Ints, view: Ints, first: Ints, tile_rows: int) -> Cut:
    """Return the rows of stacks, cut into tiles.

    Args:
        segments, tile_rows: as in `tile`.
        order, view, first: the results of `stacks`.
    """
    start, rows = segments.start[order], segments.rows[order]
    own_start = np.repeat(start, rows)
    row = np.arange(len(own_start)) + np.repeat(start - np.cumsum(rows) + rows, rows)
    lo, hi = np.zeros((2, len(segments.hi)), np.int64)
    depth = np.zeros_like(hi) if segments.drafts is None else segments.drafts[0]
    lo[row] = own_start
    hi[row] = segments.hi[row] + own_start

    height = np.add.reduceat(rows, first) if len(first) else rows
    count = -(-height // tile_rows)
    stack = np.repeat(np.arange(len(first)), count)
    q0 = start[first][stack] + ragged_arange(count) * tile_rows
    n = np.minimum(start[first][stack] + height[stack] - q0, tile_rows)
    c0 = lo[q0]  # segments start in ascending order
    c1 = np.maximum.reduceat(hi, q0) if len(q0) else q0  # rows between tiles have hi = 0
    stack_first = first[stack]
    return Cut(
        lo.astype(np.int32), hi.astype(np.int32), depth.astype(np.int32), q0, n, c0, c1 - c0, stack_first, count[stack],
        view[:, stack_first], n, np.zeros_like(q0),
    )  # fmt: skip


def paired(made: Cut, tile_rows: int) -> Cut:
    """Return tiles after joining pairs that see the same cached tokens and of which only one has own columns.

    A pair is the chain of a causal model and the group of masks after its end, whose cached K/V are then read once. No
    row's bits change: steps over columns begin at the same tokens, and what a row does not see counts as 0.
    """
    view, own = made.view, made.own
    key = 2 * ((view[0] * 3 + view[1]) * 5 + view[2] * 7 + view[3]) + (own > 0)  # equal where all four are
    key[(made.siblings > 1) | (view[1] + view[3] == 0)] = -1
    order = key.argsort(kind="stable")
    chain, group = order[:-1], order[1:]
    fit = (key[group] == key[chain] + 1) & (own[chain] == 0) & (made.rows[chain] + made.rows[group] <= tile_rows)
    chain, group = chain[fit], group[fit]
    same = (view[:, chain] == view[:, group]).all(0)
    chain, group = chain[same], group[same]
    if not len(chain):
        return made
    rows, c0, own, q1 = made.rows.copy(), made.c0.copy(), own.copy(), made.q1.copy()
    rows[chain] += made.rows[group]
    c0[chain], own[chain], q1[chain] = made.c0[group], made.own[group], made.q0[group]
    kept = np.ones(len(rows), bool)
    kept[group] = False
    return Cut(
        made.lo, made.hi, made.depth, made.q0[kept], rows[kept], c0[kept], own[kept], made.segment[kept],
        made.siblings[kept], view[:, kept], made.first[kept], q1[kept],
    )  # fmt: skip


def as_far_as_seen(made: Cut, seen: Ints) -> Cut:
    """Cut off cached columns that none of a tile's rows sees, for tiles without own columns, and return the tiles.

    These are the tiles of prompts, where each row sees one token more than the one before it.
    """
    if len(made.q0):
        _, s0, _, s1 = made.view
        last = np.maximum.reduceat(seen, made.q0)  # rows between tiles see nothing
        cached = np.where(made.own > 0, s0 + s1, np.minimum(s0 + s1, last))
        made.view[1] = np.minimum(s0, cached)
        made.view[3] = cached - made.view[1]
    return made


def stacks(segments: Segments, stacked: bool) -> tuple[Ints, Ints, Ints]:
    """Return segments in packed order, and where their stacks begin.

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
    view[::2] *= view[1::2] > 0  # the base of an empty range means nothing
    together = (start[1:] == start[:-1] + rows[:-1]) & (view[:, 1:] == view[:, :-1]).all(0)
    together &= stacked & (view[1, 1:] + view[3, 1:] > 0)  # without cached tokens there is nothing to share
    together &= segments.seen is None  # where rows are bounded, own columns continue the cached ones
    first = np.flatnonzero(np.concatenate([np.ones(min(len(rows), 1), bool), ~together]))
    return order, view, first


def tile_rows_for(heads_per_kv: int, stack_rows: int) -> int:
    """Return how many rows a tile has for stacks of `stack_rows` rows, by the cheapest matrix height of 16 to 128.

    Four branches of 32 rows with one query head per K/V head are exactly one tile of 128 rows.

    Raises:
        ValueError: more query heads per K/V head than the tallest tile has rows.
    """
    if heads_per_kv > max(ROW_COST):
        raise ValueError(f"{heads_per_kv} query heads per K/V head: meta-attention takes at most {max(ROW_COST)}")
    heights = [height for height in ROW_COST if height >= heads_per_kv]
    cost = {h: -(-stack_rows // (h // heads_per_kv)) * h * ROW_COST[h] for h in heights}
    return min(heights, key=lambda height: cost[height]) // heads_per_kv


def causal_tile_rows(heads_per_kv: int) -> int:
    """Return how many rows a tile has for causal models: as many as a matrix of 64 rows holds, but at least one.

    A multiprocessor runs two programs of that height at a time. Tiles that hold even the longest chain and the group
    after it were slower on an H200, because most chains are short. A chain and a group that do not fit in one tile read
    their cached K/V twice, the second time from L2.

    Raises:
        ValueError: more query heads per K/V head than the tallest tile has rows.
    """
    if heads_per_kv > max(ROW_COST):
        raise ValueError(f"{heads_per_kv} query heads per K/V head: meta-attention takes at most {max(ROW_COST)}")
    return max(CAUSAL_HEIGHT // heads_per_kv, 1)


def capacity(
    rows: int, stacks: int, tile_rows: int, split: Split | None = None, low: int = 0, cached: int = 0, own: int = 0
) -> Capacity:
    """Return the room that a table needs to hold any result of `tile` of that size.

    Args:
        rows: packed rows in segments.
        stacks: stacks among them; where segments are not stacked, segments.
        tile_rows, split: as in `tile`.
        low: stacks among them that may be split: those with cached tokens.
        cached: maximum cached tokens that a segment sees, in both ranges together.
        own: maximum rows of a segment.
    """
    stacks = min(stacks, rows)
    tiles = (rows - stacks) // tile_rows + stacks
    columns = cached + 2 * own + tile_rows  # a tile that begins and ends within segments sees all of their columns
    if split is None or columns <= split.columns:
        return Capacity(tiles, 0, 0)
    parts = min(low, stacks) * split.parts
    if split.room is not None:
        parts = min(parts, split.room)
    return Capacity(tiles + parts, min(tiles, parts // 2), parts)


def matrix_rows(tile_rows: int, heads_per_kv: int) -> int:
    """Return the height of the matrix that holds a tile: a power of two, at least 16."""
    return max(16, 1 << (tile_rows * heads_per_kv - 1).bit_length())
