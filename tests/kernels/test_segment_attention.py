"""Grouped segment attention equals the plain oracle, sees only what it may, and is blind to its batch."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lopa_dist.kernels.segment_attention import COLUMN_TILE, Segments, attend_grouped, attend_plain, plan
from tests.kernels.mixes import draft_columns, own_columns, sees

CPU = torch.device("cpu")
KV_HEADS, DIM = 2, 8
PATTERNS = ("full", "block_causal", "prompt_self", "drafts")


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Segments, int, int, list[bool]]:
    """Segments with their number of query rows and pool slots, and which slots some segment may see.

    Segments lie in the pool and among the query rows in any order with gaps; some share their cached tokens. In some
    batches they see a second range of cached tokens.
    """
    count = draw(st.integers(1, 5))
    rows = draw(st.lists(st.one_of(st.integers(1, 40), st.just(16)), min_size=count, max_size=count))
    caches = draw(st.lists(st.one_of(st.just(0), st.integers(0, 70)), min_size=1, max_size=count))
    tails = draw(st.one_of(st.none(), st.lists(st.integers(0, 40), min_size=count, max_size=count)))
    of = [draw(st.integers(0, len(caches) - 1)) for _ in range(count)]  # branches of a sequence share its cache
    patterns = [draw(st.sampled_from(PATTERNS)) for _ in range(count)]
    units = [draw(st.integers(1, 17)) for _ in range(count)]
    slots, seen = 0, [False] * 4096
    bases: dict[tuple[str, int], int] = {}
    lengths = {"cache": caches, "own": rows, "tail": tails or []}
    pieces = [(kind, i) for kind, of_kind in lengths.items() for i in range(len(of_kind))]
    for kind, i in draw(st.permutations(pieces)):
        slots += draw(st.integers(0, 3))  # a gap
        bases[kind, i] = slots
        slots += lengths[kind][i]
        seen[bases[kind, i] : slots] = [True] * (slots - bases[kind, i])
    start, total = [0] * count, 0
    for g in draw(st.permutations(range(count))):
        start[g], total = total, total + rows[g]
    slots, total = slots + 2, total + draw(st.integers(0, 3))
    depth, until, hi = np.zeros((3, total), np.int64)
    for g in range(count):
        at = slice(start[g], start[g] + rows[g])
        depth[at], until[at] = draft_columns(patterns[g], rows[g], units[g], draw(st.integers(0, 999)))
        hi[at] = own_columns(patterns[g], rows[g], units[g])
    columns = (
        start,
        rows,
        [bases["cache", i] for i in of],
        [caches[i] for i in of],
        [bases["own", g] for g in range(count)],
    )
    tail = None if tails is None else (np.array([bases["tail", g] for g in range(count)]), np.array(tails, np.int64))
    drafts = (depth, torch.from_numpy(until)) if depth.any() or draw(st.booleans()) else None
    return Segments(*(np.array(x, np.int64) for x in columns), hi, tail, drafts=drafts), total, slots, seen[:slots]


def tensors(rows: int, slots: int, group: int, seed: int = 0, dim: int = DIM) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, KV_HEADS * group, dim, generator=generator)
    keys, values = torch.randn(2, slots, KV_HEADS, dim, generator=generator)
    return q, keys, values


def grouped(q: Tensor, keys: Tensor, values: Tensor, segments: Segments) -> Tensor:
    groups = plan(segments, q.shape[1] // keys.shape[1], CPU, q.dtype)
    return attend_grouped(q, keys, values, groups)


def only(segments: Segments, g: int) -> tuple[Segments, slice]:
    """Segment g as a batch of its own, and where its rows were."""
    start, rows = int(segments.start[g]), int(segments.rows[g])
    at, one = slice(start, start + rows), slice(g, g + 1)
    alone = Segments(
        np.zeros(1, np.int64),
        segments.rows[one],
        segments.shared_base[one],
        segments.shared[one],
        segments.own_base[one],
        segments.hi[at],
        None if segments.tail is None else (segments.tail[0][one], segments.tail[1][one]),
        drafts=None if segments.drafts is None else (segments.drafts[0][at], segments.drafts[1][at]),
    )
    return alone, at


@pytest.mark.parametrize("tails", [None, ((14, 26), (3, 1))])
def test_the_oracle_itself_row_by_row(tails: tuple[tuple[int, int], tuple[int, int]] | None) -> None:
    q, keys, values = tensors(7, 30, group=2)
    columns = (np.array(x) for x in ([1, 4], [3, 2], [20, 5], [4, 0], [8, 2], [0, 1, 3, 2, 2, 2, 0]))
    segments = Segments(*columns, tail=tails and (np.array(tails[0]), np.array(tails[1])))
    wanted = torch.zeros_like(q)
    views = {1: (20, 4, 8, 1), 2: (20, 4, 8, 3), 3: (20, 4, 8, 2), 4: (5, 0, 2, 2), 5: (5, 0, 2, 2)}
    for row, (base, shared, own, hi) in views.items():
        slots = [*range(base, base + shared), *range(own, own + hi)]
        if tails:
            first, count = tails[0][row > 3], tails[1][row > 3]
            slots += range(first, first + count)
        for head in range(4):
            scores = [float(q[row, head] @ keys[s, head // 2]) / math.sqrt(DIM) for s in slots]
            total = sum(math.exp(x) for x in scores)
            for slot, score in zip(slots, scores, strict=True):
                wanted[row, head] += math.exp(score) / total * values[slot, head // 2]
    assert torch.allclose(attend_plain(q, keys, values, segments), wanted, atol=1e-5)
    assert torch.allclose(grouped(q, keys, values, segments), wanted, atol=1e-5)


@pytest.mark.parametrize("group", [1, 2, 4])
@given(batch=batches(), seed=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_grouped_equals_plain(group: int, batch: tuple[Segments, int, int, list[bool]], seed: int) -> None:
    segments, rows, slots, _ = batch
    q, keys, values = tensors(rows, slots, group, seed)
    plain = attend_plain(q, keys, values, segments)
    assert torch.allclose(grouped(q, keys, values, segments), plain, atol=2e-6)
    inside = np.concatenate([np.arange(s, s + n) for s, n in zip(segments.start, segments.rows, strict=True)])
    outside = np.setdiff1d(np.arange(rows), inside)
    assert not plain[outside].any()


@given(batch=batches(), group=st.sampled_from([1, 2, 4]))
@settings(max_examples=40, deadline=None)
def test_slots_of_others_are_never_read(batch: tuple[Segments, int, int, list[bool]], group: int) -> None:
    segments, rows, slots, seen = batch
    q, keys, values = tensors(rows, slots, group)
    clean = grouped(q, keys, values, segments)
    unseen = ~torch.tensor(seen)
    keys[unseen], values[unseen] = torch.nan, torch.nan
    assert torch.equal(grouped(q, keys, values, segments), clean)
    for g in range(len(segments.start)):  # nor does a segment see what only the others may
        mine = torch.zeros(slots, dtype=torch.bool)
        base, own = int(segments.shared_base[g]), int(segments.own_base[g])
        mine[base : base + int(segments.shared[g])] = True
        mine[own : own + int(segments.rows[g])] = True
        if segments.tail is not None:
            tail, count = (int(x[g]) for x in segments.tail)
            mine[tail : tail + count] = True
        alone, at = only(segments, g)
        poisoned = (x.masked_fill(~mine[:, None, None], torch.nan) for x in (keys, values))
        assert torch.allclose(grouped(q[at], *poisoned, alone), clean[at], atol=2e-6)


@given(batch=batches(), data=st.data())
@settings(max_examples=40, deadline=None)
def test_columns_that_a_row_does_not_see_have_no_weight(
    batch: tuple[Segments, int, int, list[bool]], data: st.DataObject
) -> None:
    segments, rows, slots, _ = batch
    q, keys, values = tensors(rows, slots, group=2)
    before = grouped(q, keys, values, segments)
    g = data.draw(st.integers(0, len(segments.start) - 1))
    column = data.draw(st.integers(0, int(segments.rows[g]) - 1))
    slot = int(segments.own_base[g]) + column
    keys[slot], values[slot] = keys[slot] + 3, values[slot] - 1000
    changed = (grouped(q, keys, values, segments) != before).flatten(1).any(1)
    wanted = torch.zeros(rows, dtype=torch.bool)
    start, n = int(segments.start[g]), int(segments.rows[g])
    for row in range(start, start + n):
        wanted[row] = bool(segments.hi[row] > column) and sees(segments, row, start + column)
    assert torch.equal(changed & ~wanted, torch.zeros_like(changed))
    assert changed.any() == wanted.any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_all_rows_see_is_never_hidden(bad: float) -> None:
    """A cached value that is no number reaches every row: its request must end as an error."""
    q, keys, values = tensors(8, 16, group=1)
    zero = np.zeros(1, np.int64)
    segments = Segments(zero, zero + 8, zero, zero + 4, zero + 8, np.full(8, 8))
    values[2] = bad
    for attend in (grouped, attend_plain):
        assert not attend(q, keys, values, segments).isfinite().any()


@given(batch=batches(), group=st.sampled_from([1, 2, 4]))
@settings(max_examples=40, deadline=None)
def test_bits_do_not_depend_on_the_other_segments(batch: tuple[Segments, int, int, list[bool]], group: int) -> None:
    segments, rows, slots, _ = batch
    q, keys, values = tensors(rows, slots, group)
    together = grouped(q, keys, values, segments)
    for g in range(len(segments.start)):
        alone, at = only(segments, g)
        assert torch.equal(grouped(q[at], keys, values, alone), together[at])


@given(batch=batches())
@settings(max_examples=20, deadline=None)
def test_a_segment_is_padded_by_its_own_length_alone(batch: tuple[Segments, int, int, list[bool]]) -> None:
    segments, *_ = batch
    shapes = {}
    for group in plan(segments, 2, CPU, torch.float32):
        for rows, columns in zip(*(x.view(group.count, -1).tolist() for x in (group.rows, group.columns)), strict=True):
            shapes[rows[0]] = (len(rows), len(columns))
    own = np.array([segments.hi[s : s + n].max() for s, n in zip(segments.start, segments.rows, strict=True)])
    lengths = segments.shared + own + (0 if segments.tail is None else segments.tail[1])
    padded = (np.ceil(lengths / COLUMN_TILE) * COLUMN_TILE).astype(int)
    wanted = zip(segments.start.tolist(), zip(segments.rows.tolist(), padded.tolist(), strict=True), strict=True)
    assert shapes == dict(wanted)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("group", [1, 3, 4, 7])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 16, 33])
def test_bits_do_not_depend_on_the_thread(rows: int, group: int) -> None:
    count, shared = 6, 37
    each = rows + shared
    segments = Segments(
        start=np.arange(count) * rows,
        rows=np.full(count, rows),
        shared_base=np.arange(count) * each,
        shared=np.full(count, shared),
        own_base=np.arange(count) * each + shared,
        hi=np.full(count * rows, rows),
    )
    q, keys, values = tensors(count * rows, count * each, group, dim=64)
    together = grouped(q, keys, values, segments)
    for g in range(count):
        alone, at = only(segments, g)
        assert torch.equal(grouped(q[at], keys, values, alone), together[at])
