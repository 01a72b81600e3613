"""Tiles cover what the oracle sees exactly once, are cut by their own stack alone, and waste what they should."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lopa_dist.kernels import c_tiles
from lopa_dist.kernels import tiles as tiles_file
from lopa_dist.kernels.segment_attention import Segments
from lopa_dist.kernels.tiles import (
    KeptTiles,
    Split,
    Tiles,
    capacity,
    causal_tile_rows,
    matrix_rows,
    stacks,
    tile,
    tile_rows_for,
    tiles_of_plain,
)
from lopa_dist.ragged import ragged_arange
from tests.kernels.mixes import Mix, mixes, seen_slots, subset

SPLITS = [None, Split(2, 8), Split(6, 8), Split(30, 24)]
Cut = tuple[int, Split | None, bool]
CUTS = st.tuples(st.sampled_from([1, 3, 16, 64]), st.sampled_from(SPLITS), st.booleans())


def covered(tiles: Tiles) -> dict[int, list[int]]:
    """The pool slots that each packed row sees, by row, as the table has it."""
    found: dict[int, list[int]] = {}
    for q0, rows, s0_base, s0, s1_base, s1, c0, c1, _, before, first, q1 in tiles.table.tolist():
        for row in [*range(q0, q0 + first), *range(q1, q1 + rows - first)]:
            slots = found.setdefault(row, [])
            cached = [*range(s0_base, s0_base + s0), *range(s1_base, s1_base + s1)]
            slots += cached[: max(int(tiles.seen[row]) - before, 0)]
            own = [c for c in range(c0, c1) if tiles.lo[row] <= c < tiles.hi[row]]
            slots += [tiles.scratch + c for c in own if tiles.until is None or tiles.depth[row] < tiles.until[c]]
    return found


@given(mix=st.one_of(mixes(), mixes(bounded=True)), cut=CUTS)
@settings(max_examples=80, deadline=None)
def test_every_row_sees_every_column_once(mix: Mix, cut: Cut) -> None:
    tiles = tile(mix.segments, *cut)
    wanted = seen_slots(mix.segments)
    found = covered(tiles)
    assert found.keys() == wanted.keys()
    assert all(Counter(found[row]) == Counter(wanted[row]) for row in wanted)
    columns = tiles.table[:, [3, 5]].sum(1) + tiles.table[:, 7] - tiles.table[:, 6]
    assert (np.diff(columns) <= 0).all(), "longest first"
    assert (tiles.table[:, 1] >= 1).all()
    assert (tiles.table[:, 1] <= cut[0]).all()


@given(mixed=st.lists(st.one_of(mixes(), mixes(bounded=True)), min_size=1, max_size=4), cut=CUTS)
@settings(max_examples=40, deadline=None)
def test_what_is_kept_changes_nothing(mixed: list[Mix], cut: Cut) -> None:
    """Neither the same rows with other cached tokens, nor other rows, find what is not theirs."""
    kept = KeptTiles()
    for mix in mixed:
        moved = replace(mix.segments, shared_base=mix.segments.shared_base + 7, shared=mix.segments.shared // 2)
        for segments in (mix.segments, moved, mix.segments):
            found, wanted = tile(segments, *cut, kept), tile(segments, *cut)
            for name in ("table", "seen", "lo", "hi", "depth", "merges"):
                one, other = getattr(found, name), getattr(wanted, name)
                assert one.dtype == other.dtype
                assert np.array_equal(one, other)
            assert (found.parts, found.scratch) == (wanted.parts, wanted.scratch)
            assert found.until is wanted.until, "it is this step's"


@given(
    mix=st.one_of(mixes(), mixes(bounded=True)), tile_rows=st.sampled_from([1, 3, 16, 64]), stacked=st.booleans(),
    split=st.sampled_from([*SPLITS, Split(7, 8, 5), Split(40, 8, 0), Split(9, 16, 40)]),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_c_cuts_as_numpy_does(mix: Mix, tile_rows: int, stacked: bool, split: Split | None) -> None:
    assert not isinstance(c_tiles.found(), str), "there is a C compiler wherever tests run"
    made, wanted = (cut(mix.segments, tile_rows, split, stacked) for cut in (c_tiles.tiles_of, tiles_of_plain))
    for name in ("table", "seen", "lo", "hi", "depth", "merges"):
        one, other = getattr(made, name), getattr(wanted, name)
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)
    assert (made.parts, made.scratch, made.tile_rows) == (wanted.parts, wanted.scratch, wanted.tile_rows)
    assert made.until is wanted.until


def test_numpy_cuts_where_there_is_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    segments = windows(2, 3, 20, [100, 50])
    unordered = replace(segments, own_base=segments.own_base + np.arange(6))
    wanted = tile(segments, 16, Split(8, 16))
    for found in (c_tiles.found(), "there is no C compiler"):
        monkeypatch.setattr(c_tiles, "found", lambda found=found: found)
        assert np.array_equal(tile(segments, 16, Split(8, 16)).table, wanted.table)
        with pytest.raises(ValueError, match="own_base"):
            tile(unordered, 16)


def test_a_forward_that_comes_again_is_not_cut_again(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, same = KeptTiles(), lambda cached: windows(1, 3, 20, [cached])
    first = tile(same(100), 16, Split(8, 16), True, kept)
    assert tile(same(100), 16, Split(8, 16), True, kept) is first
    assert tile(same(164), 16, Split(8, 16), True, kept).table[:, 3].sum() > first.table[:, 3].sum()
    monkeypatch.setattr(tiles_file, "MOST_ROWS_KEPT", 100)
    for rows in range(1, 30):
        tile(windows(1, 1, rows, [9]), 16, None, True, kept)
        assert kept.rows <= 100
        assert sum(len(made.hi) for made in kept.tiles.values()) == kept.rows
    with pytest.raises(ValueError, match="own_base"):
        tile(replace(same(100), own_base=same(100).own_base + np.array([0, 1, 2])), 16, None, True, kept)


@given(mix=mixes(), cut=CUTS)
@settings(max_examples=80, deadline=None)
def test_parts_are_numbered_and_merged_once(mix: Mix, cut: Cut) -> None:
    tiles = tile(mix.segments, *cut)
    by_rows: dict[tuple[int, int], list[int]] = {}
    for entry in tiles.table.tolist():
        by_rows.setdefault((entry[0], entry[1]), []).append(entry[8])
    merges = {(q0, rows): list(range(first, first + parts)) for q0, rows, first, parts, *_ in tiles.merges.tolist()}
    assert len(merges) == len(tiles.merges)
    for rows, parts in by_rows.items():
        assert sorted(parts) == merges.get(rows, [-1])
    assert sorted(part for parts in merges.values() for part in parts) == list(range(tiles.parts))


@given(mix=mixes(), cut=CUTS)
@settings(max_examples=80, deadline=None)
def test_the_capacity_holds_and_a_sequence_is_cut_by_itself(mix: Mix, cut: Cut) -> None:
    segments = mix.segments
    tiles = tile(segments, *cut)
    cached = segments.shared + (0 if segments.tail is None else segments.tail[1])
    room = capacity(
        int(segments.rows.sum()), len(segments.rows), *cut[:2], int((cached > 0).sum()), int(cached.max()),
        int(segments.rows.max()),
    )  # fmt: skip
    assert len(tiles.table) <= room.tiles
    assert len(tiles.merges) <= room.merges
    assert tiles.parts <= room.parts
    together = Counter(tuple(entry[:8]) for entry in tiles.table.tolist())
    for sequence in set(mix.sequence):
        alone = tile(subset(segments, np.array(mix.sequence) == sequence), *cut)
        assert not Counter(tuple(entry[:8]) for entry in alone.table.tolist()) - together


@given(
    mix=mixes(bounded=True), tile_rows=st.sampled_from([1, 3, 16]), parts=st.integers(2, 40), room=st.integers(0, 100)
)
@settings(max_examples=80, deadline=None)
def test_parts_never_exceed_the_room(mix: Mix, tile_rows: int, parts: int, room: int) -> None:
    """Where rows are bounded each segment is a stack of its own, and a sequence has many."""
    split = Split(parts, 8, room)
    tiles = tile(mix.segments, tile_rows, split)
    cached = mix.segments.shared + (0 if mix.segments.tail is None else mix.segments.tail[1])
    has = capacity(
        int(mix.segments.rows.sum()), len(mix.segments.rows), tile_rows, split, int((cached > 0).sum()),
        int(cached.max()), int(mix.segments.rows.max()),
    )  # fmt: skip
    assert tiles.parts <= room
    assert tiles.parts <= has.parts
    assert len(tiles.merges) <= has.merges
    assert len(tiles.table) <= has.tiles


@given(mix=mixes(), cut=CUTS)
@settings(max_examples=80, deadline=None)
def test_low_stacks_alone_are_split(mix: Mix, cut: Cut) -> None:
    """As far as their parts are no more than they may be, and as evenly as whole steps of columns are."""
    tile_rows, split, stacked = cut
    tiles, whole = tile(mix.segments, *cut), tile(mix.segments, tile_rows, None, stacked)
    order, _, first = stacks(mix.segments, stacked)
    of_stack = np.searchsorted(mix.segments.start[order][first], whole.table[:, 0], "right")
    parts = {(q0, rows): count for q0, rows, _, count, *_ in tiles.merges.tolist()}
    for stack in np.unique(of_stack):
        entries = whole.table[of_stack == stack]
        found = [parts.get((q0, rows), 1) for q0, rows in entries[:, :2].tolist()]
        if split is None or len(entries) > split.parts // 2 or not entries[0, [3, 5]].any():
            assert set(found) == {1}
            continue
        assert sum(found) <= split.parts
        columns = entries[:, [3, 5]].sum(1) + entries[:, 7] - entries[:, 6]
        for count, width in zip(found, columns, strict=True):
            most = split.parts // len(entries)
            assert count * split.columns < width + split.columns
            assert count == most or -(-width // count) <= -(-width // most) + split.columns


def test_a_long_prompt_after_a_prefix_is_not_split() -> None:
    """Nor does a short one become tiny pieces."""

    def parts(rows: int, cached: int) -> int:
        return tile(windows(1, 1, rows, [cached]), 18, Split(66)).parts

    assert [parts(rows, 2000) for rows in (20_000, 8192, 600, 594)] == [0, 0, 0, 66]
    assert parts(18, 20_000) == 53, "157 steps of 128 columns, three a part"
    assert parts(18, 128) == 2
    assert tile(windows(0, 0, 0, [], [500]), 18, Split(66)).parts == 0, "it sees itself alone"


def test_where_an_empty_range_lies_says_nothing() -> None:
    """Two sequences that see one shared prompt are a stack, whether or not a third has a tail of its own."""
    segments = windows(3, 1, 32, [100, 100, 100])
    segments.shared_base[:2] = 0
    for length in (0, 7):
        segments.tail = np.array([100, 140, 180]), np.array([0, 0, length])
        assert sorted(tile(segments, 128).table[:, :2].tolist()) == [[0, 64], [64, 32]]


def test_branches_are_stacked_only_if_they_share_something() -> None:
    def heights(cached: int, stacked: bool = True) -> list[int]:
        return tile(windows(1, 4, 32, [cached]), 128, stacked=stacked).table[:, 1].tolist()

    assert heights(100) == [128]
    assert heights(100, stacked=False) == [32] * 4
    assert heights(0) == [32] * 4
    two = windows(2, 2, 32, [100, 100])
    assert tile(two, 128).table[:, 1].tolist() == [64, 64]  # sequences with equal lengths are no stack
    assert tile(two, 64).table[:, 6:8].tolist() == [[0, 64], [64, 128]]
    assert tile(two, 32).table[:, 6:8].tolist() == [[0, 32], [32, 64], [64, 96], [96, 128]]  # no sibling's columns


def test_own_keys_must_lie_in_packed_order() -> None:
    segments = windows(2, 2, 8, [5, 6])
    segments.own_base = segments.own_base + np.array([0, 0, 0, 1])
    with pytest.raises(ValueError, match="scratch"):
        tile(segments, 16)


def test_no_segments() -> None:
    nothing = np.zeros(0, np.int64)
    tiles = tile(Segments(nothing, nothing, nothing, nothing, nothing, np.zeros(16, np.int64)), 16, Split(4, 32))
    assert tiles.table.shape == (0, 12)
    assert tiles.merges.shape == (0, 6)
    assert tiles.hi.shape == (16,)


@pytest.mark.parametrize(
    ("group", "stack", "rows"),
    [(1, 4 * 32, 128), (1, 8 * 16, 128), (1, 8 * 32, 128), (1, 32, 32), (1, 5 * 32, 64), (7, 8 * 32, 9), (7, 1, 2)],
)
def test_tile_heights(group: int, stack: int, rows: int) -> None:
    assert tile_rows_for(group, stack) == rows


def test_too_many_heads() -> None:
    with pytest.raises(ValueError, match="at most 128"):
        tile_rows_for(129, 32)


def spent(tiles: Tiles, heads_per_kv: int, column_tile: int) -> int:
    """Score elements that the tiles work out, per K/V head: whole matrices of rows and columns."""
    height = matrix_rows(tiles.tile_rows, heads_per_kv)
    columns = tiles.table[:, 3] + tiles.table[:, 5] + tiles.table[:, 7] - tiles.table[:, 6]
    return int((-(-columns.astype(np.int64) // column_tile) * column_tile).sum()) * height


def seen(segments: Segments) -> int:
    """Score elements that there are, per head."""
    row = ragged_arange(segments.rows) + np.repeat(segments.start, segments.rows)
    return int((segments.shared * segments.rows).sum() + segments.hi[row].sum())


@pytest.mark.parametrize(("tile_rows", "waste"), [(32, 1.08), (64, 1.22), (128, 1.54)])
def test_waste_of_a_mix(tile_rows: int, waste: float) -> None:
    """XY-Serve's tile heights on 16 prompts and 64 samples of five branches."""
    generator = np.random.default_rng(0)
    prompts = generator.integers(100, 870, 16)
    cached = generator.integers(400, 1100, 64)
    segments = windows(64, 5, 32, cached.tolist(), prompts.tolist())
    assert spent(tile(segments, tile_rows), 1, 64) / seen(segments) == pytest.approx(waste, abs=0.03)


def test_four_branches_waste_nothing_but_their_corner() -> None:
    segments = windows(16, 4, 32, [1024] * 16)
    assert spent(tile(segments, 128), 1, 32) / seen(segments) == (1024 + 128) / (1024 + 32)
    assert spent(tile(segments, 32), 1, 32) == seen(segments)


def windows(sequences: int, branches: int, rows: int, cached: list[int], prompts: list[int] | None = None) -> Segments:
    """Prompts that see themselves, then windows of equal height on their sequences' cached tokens."""
    prompts = prompts or []
    count = np.array([*prompts, *[rows] * (sequences * branches)])
    shared = np.concatenate([np.zeros(len(prompts), np.int64), np.repeat(cached, branches)]).astype(np.int64)
    base = np.concatenate([np.zeros(len(prompts), np.int64), np.repeat(np.cumsum(cached) - cached, branches)])
    base = base.astype(np.int64)
    start = np.cumsum(count) - count
    return Segments(start, count, base, shared, sum(cached) + start, np.repeat(count, count))


def read(tiles: Tiles) -> int:
    """Columns that all tiles read together, each of K and V of every K/V head."""
    return int(tiles.table[:, [3, 5]].sum() + (tiles.table[:, 7] - tiles.table[:, 6]).sum())


def causal_step(sequences: int, cached: int, chain: int, group: int, prompt: int = 0) -> Segments:
    """A prompt that is computed, chains, whose tokens are cached, and the groups after them."""
    of = np.arange(sequences)
    rows = np.concatenate([[prompt] * (prompt > 0), np.repeat([chain, group], sequences)]).astype(np.int64)
    base = np.concatenate([[0] * (prompt > 0), np.tile(prompt + of * cached, 2)]).astype(np.int64)
    shared = np.concatenate([[prompt] * (prompt > 0), np.full(2 * sequences, cached)]).astype(np.int64)
    start, number = np.cumsum(rows) - rows, np.concatenate([np.arange(n) for n in rows])
    kind = np.repeat([0] * (prompt > 0) + [1] * sequences + [2] * sequences, rows)
    seen = np.select([kind == 0, kind == 1], [number + 1, cached - chain + number + 1], cached)
    scratch = prompt + sequences * cached
    return Segments(start, rows, base, shared, scratch + start, np.where(kind == 2, number + 1, 0), None, seen)


@pytest.mark.parametrize("split", [None, Split(4)])
def test_chains_and_the_groups_after_them_read_cached_columns_once(split: Split | None) -> None:
    """64 sequences of Qwen3-8B with 7 drafts and 1,000 cached tokens: in tiles of their own they read them twice."""
    rows = causal_tile_rows(4)
    tiles = tile(causal_step(64, 1000, 8, 7), rows, split)
    assert read(tiles) == 64 * (1000 + 7)
    assert read(tile(causal_step(64, 1000, 9, 8), rows, split)) == 64 * (2 * 1000 + 8), "a tile holds no more"


def test_tiles_of_a_prompt_end_at_their_own_last_bound() -> None:
    """2,000 tokens in tiles of 32 rows: half of what they read when each went on to the end of the prompt."""
    tiles = tile(causal_step(3, 100, 5, 4, prompt=2000), 32)
    of_prompt = tiles.table[tiles.table[:, 0] < 2000]
    assert sorted(of_prompt[:, 3]) == [*range(32, 2000, 32), 2000]
    assert of_prompt[:, 3].sum() == 64_496
    assert read(tiles) == 64_496 + 3 * 104


def test_the_end_of_a_prompts_tile_may_lie_in_either_range() -> None:
    segments = causal_step(0, 0, 0, 0, prompt=40)
    segments.shared[:], segments.tail = 24, (np.array([100]), np.array([16]))
    found = tile(segments, 16).table[:, [3, 5]].tolist()
    assert found == [[24, 16], [24, 8], [16, 0]]


@pytest.mark.parametrize(("heads_per_kv", "rows"), [(1, 64), (4, 16), (7, 9), (8, 8), (90, 1), (128, 1)])
def test_tiles_of_causal_models_fill_matrices_of_64_rows(heads_per_kv: int, rows: int) -> None:
    assert causal_tile_rows(heads_per_kv) == rows


def test_more_heads_than_the_highest_tile_has_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 128"):
        causal_tile_rows(129)
