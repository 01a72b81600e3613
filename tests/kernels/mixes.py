"""Random batches as the engine packs them: prompts, windows and stacked branches in one pool."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from lopa_dist.kernels.segment_attention import Segments

KINDS = ("full", "causal", "block_causal", "prompt_self", "drafts")


@dataclass
class Mix:
    """Segments, and how many packed rows (padding included) and pool slots there are."""

    segments: Segments
    rows: int
    slots: int
    scratch: int
    sequence: list[int]  # of each segment


def first_columns(kind: str, rows: int, unit: int) -> list[int]:
    """`lo` of a segment's rows; `unit` is the number of token rows, of which there are at most half as many as rows."""
    if kind != "drafts":
        return [0] * rows
    t = min(unit, (rows - 1) // 2)
    return [*range(t), *[t] * (rows - 2 * t), *range(t - 1, -1, -1)]


def own_columns(kind: str, rows: int, unit: int) -> list[int]:
    """`hi` of a segment's rows; `unit` is the block size, the length of the prompt, or the number of token rows."""
    if kind == "drafts":
        window = rows - 2 * min(unit, (rows - 1) // 2)
        return [lo + window for lo in first_columns(kind, rows, unit)]
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
    cached tokens and nothing else, and no row sees an interval.
    """
    tails = draw(st.booleans())
    columns: list[tuple[int, ...]] = []
    lo: list[int] = []
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
            lo += [0] * (len(hi) - len(lo)) + first_columns(kind, rows, unit)
            in_pool = bounded and cached + tail > 0 and draw(st.booleans())
            bounds = st.integers(1, cached + tail) if in_pool else st.just(cached + tail)
            seen += [0] * (len(hi) - len(seen)) + draw(st.lists(bounds, min_size=rows, max_size=rows))
            hi += [0] * rows if in_pool else own_columns(kind, rows, unit)
            owners.append(sequence)
    scratch = slots + draw(st.integers(0, 3))
    hi += [0] * (-len(hi) % 16)
    lo += [0] * (len(hi) - len(lo))
    seen += [0] * (len(hi) - len(seen))
    start, rows_of, base_of, cached_of, tail_base_of, tail_of = np.array(columns, np.int64).T
    segments = Segments(
        start, rows_of, base_of, cached_of, scratch + start, np.array(hi, np.int64),
        (tail_base_of, tail_of) if tails else None, np.array(lo, np.int64) if any(lo) else None,
        np.array(seen, np.int64) if bounded else None,
    )  # fmt: skip
    return Mix(segments, len(hi), scratch + len(hi), scratch, owners)


def subset(segments: Segments, which: list[int] | np.ndarray) -> Segments:
    """Some segments of a batch, where they are."""
    tail = None if segments.tail is None else (segments.tail[0][which], segments.tail[1][which])
    return Segments(
        segments.start[which], segments.rows[which], segments.shared_base[which], segments.shared[which],
        segments.own_base[which], segments.hi, tail, segments.lo, segments.seen,
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
            lo = 0 if segments.lo is None else int(segments.lo[row])
            some = slots if segments.seen is None else slots[: int(segments.seen[row])]
            found[row] = [*some, *range(own + lo, own + int(segments.hi[row]))]
    return found


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
