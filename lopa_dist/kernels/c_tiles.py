"""Tiles cut in C: the same as numpy's (`tiles.tiles_of_plain`), in a tenth of the time, in which a GPU is idle."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import numpy as np

from lopa_dist.c_library import INT, LONG, P, load_or_why, memory
from lopa_dist.kernels.segment_attention import Segments
from lopa_dist.kernels.tiles import FIELDS, MERGE_FIELDS, Split, Tiles, unordered

SOURCE = Path(__file__).with_name("tiles.c")
FUNCTIONS = {"tiles_cut": (INT, (LONG, LONG, *[P] * 10, LONG, INT, LONG, LONG, LONG, P, LONG, P, P, P))}
UNORDERED, NO_MEMORY = 1, 2  # what `tiles_cut` returns


@cache
def found() -> ctypes.CDLL | str:
    """Return the C library, or why there is none."""
    return load_or_why(SOURCE, FUNCTIONS)


def tiles_of(segments: Segments, tile_rows: int, split: Split | None, stacked: bool) -> Tiles:
    """Return what `tiles.tiles_of_plain` does; the library must have been `found`."""
    library = found()
    assert not isinstance(library, str)
    count, rows = len(segments.start), len(segments.hi)
    tail_base, tail = segments.tail or (None, None)
    depth, until = segments.drafts or (None, None)
    given = (
        segments.start, segments.rows, segments.shared_base, segments.shared, segments.own_base, tail_base, tail,
        segments.hi, segments.seen, depth,
    )  # fmt: skip
    arrays = [None if array is None else np.ascontiguousarray(array, np.int64) for array in given]
    most = rows // tile_rows + count  # tiles, of which a split makes at most so many more
    room = most if split is None else most + count * split.parts
    table, merges = np.empty((room, FIELDS), np.int32), np.empty((most, MERGE_FIELDS), np.int32)
    of_rows, counts = np.empty((4, rows), np.int32), np.zeros(4, np.int64)
    parts, columns, limit = (0, 1, None) if split is None else (split.parts, split.columns, split.room)
    result = library.tiles_cut(
        count, rows, *(None if array is None else memory(array) for array in arrays), tile_rows, stacked,
        parts, columns, -1 if limit is None else limit, memory(table), room, memory(of_rows),
        memory(merges), memory(counts),
    )  # fmt: skip
    if result == UNORDERED:
        raise unordered()
    if result:
        raise MemoryError("tiles_cut") if result == NO_MEMORY else AssertionError("more tiles than there can be")
    tiles, merged, of_merges, scratch = counts.tolist()
    seen, lo, hi, row_depth = of_rows
    return Tiles(table[:tiles], seen, lo, hi, row_depth, until, merges[:merged], of_merges, scratch, tile_rows)
