"""Random batches as the engine packs them: prompts, windows and stacked branches in one pool."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from lopa_dist.kernels.segment_attention import Segments
from lopa_dist.ragged import UNBOUNDED

KINDS = ("full", "causal", "block_causal", "prompt_self", "drafts")


@dataclass
class Mix:
    """Segments, and how many packed rows (padding included) and pool slots there are."""

    segments: Segments
    rows: int
    slots: int
    scratch: int
    sequence: list[int]  # of each segment


def token_rows(rows: int, unit: int) -> int:
    """How many of a segment's rows are drafts' token rows: at most `unit`, and at most as many as its window has."""
    return min(unit, rows // 3)


def draft_columns(kind: str, rows: int, unit: int, seed: int) -> tuple[list[int], list[int]]:
    """`depth` and `until` of a segment's rows; its masks, and rows of later blocks, are anywhere in the window."""
    if kind != "drafts":
        return [0] * rows, [UNBOUNDED] * rows
    t = token_rows(rows, unit)
    depths = list(range(1, t + 1))
    window = [*depths, *[UNBOUNDED] * (rows - 3 * t)]
    window[t:] = [Random(seed + i).choice([UNBOUNDED, 1]) for i in range(rows - 3 * t)]
    Random(seed).shuffle(window)
    return [0] * len(window) + depths + depths, window + [UNBOUNDED] * (2 * t)


def own_columns(kind: str, rows: int, unit: int) -> list[int]:
    """`hi` of a segment's rows; `unit` is the block size, the length of the prompt, or the number of token rows."""
    if kind == "drafts":
        t = token_rows(rows, unit)
        seen = [rows - 2 * t + i for i in range(1, t + 1)]
        return [rows - 2 * t] * (rows - 2 * t) + seen + seen
    if kind == "full":
        return [rows] * rows
    if kind == "causal":
        return list(range(1, rows + 1))
    if kind == "block_causal":
        return [min((r // unit + 1) * unit, rows) for r in range(rows)]
    prompt = min(unit, rows)
    return [prompt] * prompt + [rows] * (rows - prompt)


@st.composite
def mixes(
    draw: st.DrawFn,
    sequences: int = 4,
    most_rows: int = 40,
    most_cached: int = 70,
    window: int | None = None,
    bounded: bool = False,
) -> Mix:
    """Sequences in any order in the pool, their branches adjacent among the rows, now and then rows of padding.

    Segments have `window` rows, or 1 to `most_rows`. With `bounded` there are also segments whose rows see parts of the
    cached tokens and nothing else, and no rows of drafts.
    """
    tails = draw(st.booleans())
    columns: list[tuple[int, ...]] = []
    depth: list[int] = []
    until: list[int] = []
    hi: list[int] = []
    owners: list[int] = []
    seen: list[int] = []
    slots = 0
    for sequence in range(draw(st.integers(1, sequences))):
        kind = draw(st.sampled_from(KINDS[: 3 if bounded else None]))
        rows = window or draw(st.one_of(st.integers(1, most_rows), st.just(16)))
        unit = draw(st.integers(1, 17))
        cached = draw(st.one_of(st.just(0), st.integers(1, most_cached)))
        tail = draw(st.integers(0, 30)) if tails else 0
        base = slots + draw(st.integers(0, 3))
        tail_base = base + cached + draw(st.integers(0, 3))
        slots = tail_base + tail
        hi += [0] * draw(st.sampled_from([0, 0, 0, 2]))  # padding; the engine has it at the end only
        for _ in range(draw(st.integers(1, 4))):
            columns.append((len(hi), rows, base, cached, tail_base, tail))
            of_rows, of_columns = draft_columns(kind, rows, unit, draw(st.integers(0, 999)))
            depth += [0] * (len(hi) - len(depth)) + of_rows
            until += [UNBOUNDED] * (len(hi) - len(until)) + of_columns
            in_pool = bounded and cached + tail > 0 and draw(st.booleans())
            bounds = st.integers(1, cached + tail) if in_pool else st.just(cached + tail)
            seen += [0] * (len(hi) - len(seen)) + draw(st.lists(bounds, min_size=rows, max_size=rows))
            hi += [0] * rows if in_pool else own_columns(kind, rows, unit)
            owners.append(sequence)
    scratch = slots + draw(st.integers(0, 3))
    hi += [0] * (-len(hi) % 16)
    depth += [0] * (len(hi) - len(depth))
    until += [UNBOUNDED] * (len(hi) - len(until))
    seen += [0] * (len(hi) - len(seen))
    start, rows_of, base_of, cached_of, tail_base_of, tail_of = np.array(columns, np.int64).T
    segments = Segments(
        start, rows_of, base_of, cached_of, scratch + start, np.array(hi, np.int64),
        (tail_base_of, tail_of) if tails else None, np.array(seen, np.int64) if bounded else None,
        (np.array(depth, np.int64), torch.tensor(until)) if any(depth) else None,
    )  # fmt: skip
    return Mix(segments, len(hi), scratch + len(hi), scratch, owners)


def rows_of(first: int, count: int, base: int, cut: int, cut_base: int) -> Segments:
    """Rows of tokens `first` on of a sequence whose first `cut` tokens lie elsewhere in the pool than the rest."""
    end = first + count
    some = min(cut, end)
    arrays = [np.array([x]) for x in (0, count, cut_base, some, 0, base + some, end - some)]
    start, rows, shared_base, shared, own, tail_base, tail = arrays
    hi, seen = np.zeros(count, np.int64), np.arange(first, end) + 1
    return Segments(start, rows, shared_base, shared, own, hi, (tail_base, tail), seen)


def subset(segments: Segments, which: list[int] | np.ndarray) -> Segments:
    """Some segments of a batch, where they are."""
    tail = None if segments.tail is None else (segments.tail[0][which], segments.tail[1][which])
    return Segments(
        segments.start[which], segments.rows[which], segments.shared_base[which], segments.shared[which],
        segments.own_base[which], segments.hi, tail, segments.seen, segments.drafts,
    )  # fmt: skip


def seen_slots(segments: Segments) -> dict[int, list[int]]:
    """The pool slots that each packed row sees, by row."""
    found = {}
    for g, start in enumerate(segments.start.tolist()):
        base, cached, own = (int(x[g]) for x in (segments.shared_base, segments.shared, segments.own_base))
        slots = [*range(base, base + cached)]
        if segments.tail is not None:
            slots += range(int(segments.tail[0][g]), int(segments.tail[0][g] + segments.tail[1][g]))
        for row in range(start, start + int(segments.rows[g])):
            some = slots if segments.seen is None else slots[: int(segments.seen[row])]
            columns = range(int(segments.hi[row]))
            found[row] = [*some, *(own + c for c in columns if sees(segments, row, start + c))]
    return found


def sees(segments: Segments, row: int, other: int) -> bool:
    """Whether a row sees another one of its segment that is before its `hi`."""
    if segments.drafts is None:
        return True
    depth, until = segments.drafts
    return bool(depth[row] < until[other])


def tensors(mix: Mix, kv_heads: int, group: int, dim: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Random q ``[R, H, D]`` and pools ``[slots, Hkv, D]``."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(mix.rows, kv_heads * group, dim, generator=generator)
    keys, values = torch.randn(2, mix.slots, kv_heads, dim, generator=generator)
    return q, keys, values


def poisoned(mix: Mix, *qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same tensors with NaN in rows of no segment, and in slots that nobody sees.

    Slots of a segment's own rows hold numbers even where nobody sees them, as those of verification rows: the forward
    has computed them.
    """
    q, keys, values = (x.clone() for x in qkv)
    views = seen_slots(mix.segments)
    q[[row for row in range(mix.rows) if row not in views]] = torch.nan
    unseen = torch.ones(mix.slots, dtype=torch.bool)
    unseen[[slot for slots in views.values() for slot in slots]] = False
    unseen[[mix.scratch + row for row in views]] = False
    keys[unseen], values[unseen] = torch.nan, torch.nan
    return q, keys, values
