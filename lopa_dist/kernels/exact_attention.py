"""Attention whose bits follow from what a row sees, and from nothing else.

A causal model's text must not depend on how many rows are verified in one forward. So a row has to add up the same
numbers in the same order, whether it runs alone or behind drafts, and wherever the border between cached tokens and the
rows of this forward lies. Three things give that by construction:

- columns are cut into tiles of `COLUMNS`, from the sequence's first token on, and every product has one fixed shape,
  ``[ROWS, D] x [D, COLUMNS]``, then ``[ROWS, COLUMNS] x [COLUMNS, D]``;
- weights of columns that a row does not see are exactly 0, and so is all that follows from them;
- tiles are added in their order, and those behind the last one that a row sees add zeros to a sum that is finished.

What remains is the promise of every batched engine: a matrix library gives a row of a product of fixed shape the same
bits in any place (docs/architecture.md, "Why batch, rank and order do not matter").
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lopa_dist.kernels.segment_attention import Segments
from lopa_dist.ragged import Ints, to_device

ROWS, COLUMNS = 8, 32  # of the products: query rows with their stacked heads, and K/V columns
MOST_SCORES = 1 << 16  # of a group: with their K/V they stay in a core's cache, and bound memory
FAR = -60.0  # scores are taken to be at most so far below the row's best one: what lies lower takes a CPU's exponential
# function twenty times as long
NOTHING = 1e-26  # weights up to this, a little more than e^FAR, are 0: they are far less than a rounding error
FEW_PRODUCTS = 256  # this many more products cost less than another group


@dataclass
class Group:
    """Runs of rows that are computed together, and padded to the same numbers of row tiles and column tiles.

    Query heads that share a K/V head are stacked as rows. Rows are numbered as in ``q.view(R * H, D)``, columns as in
    ``keys.view(slots * Hkv, D)``.
    """

    rows: Tensor  # [row tiles * G * Hkv * ROWS] of q; any row where there is none
    results: Tensor  # [row tiles * G * Hkv * ROWS] likewise; R * H, which is never read, where there is none
    columns: Tensor  # [column tiles * G * Hkv * COLUMNS] of keys and values
    mask: Tensor  # [row tiles, column tiles, G, 1, ROWS, COLUMNS] fp32: -inf for what is not seen, else 0


@dataclass
class Runs:
    """Rows of one or two segments that are computed together because they see the same columns."""

    segment: Ints  # [U] whose columns they see
    front: Ints  # [U] the segment whose rows come first, which sees no more than the cached columns; -1: none
    rows: Ints  # [U] of both


def plan(segments: Segments, total: int, heads: int, kv_heads: int, device: torch.device) -> list[Group]:
    """Group segments, once per forward; every layer uses the result.

    A row sees a beginning of its segment's columns: cached tokens, then own ones.

    Args:
        segments: of the forward.
        total: packed rows, padding included.
        heads, kv_heads: the model's, on this rank.
        device: of the tensors.

    Raises:
        ValueError: rows that see something else (`Segments.drafts`).
    """
    if segments.drafts is not None:
        raise ValueError("exact attention takes rows that see a beginning of their columns, without gaps")
    if not len(segments.rows):
        return []
    tail = segments.tail or (np.zeros_like(segments.shared), np.zeros_like(segments.shared))
    cached = segments.shared + tail[1]
    own = np.maximum.reduceat(segments.hi, segments.start)
    runs = runs_of(segments, tail, cached, own)
    last = np.maximum(cached + own, 1)[runs.segment] - 1  # the last column that some row of a run sees
    row_tiles = -(-runs.rows * (heads // kv_heads) // ROWS)
    column_tiles = last // COLUMNS + 1
    found = []
    for some, height, width in alike(row_tiles, column_tiles):
        most = max(1, MOST_SCORES // (height * width * kv_heads * ROWS * COLUMNS))
        for begin in range(0, len(some), most):
            of = some[begin : begin + most]
            columns = np.minimum(np.arange(width * COLUMNS), last[of, None])
            slots = slots_of(segments, tail, runs.segment[of, None], columns).reshape(len(of), width, COLUMNS)
            by_head = slots.swapaxes(0, 1)[:, :, None] * kv_heads + np.arange(kv_heads)[:, None]
            parts = *stacked(segments, cached, runs, of, height, total, heads, kv_heads), by_head.ravel()
            rows, results, seen, columns_ = (to_device(part, device) for part in parts)
            column = torch.arange(width * COLUMNS, device=device).view(width, 1, 1, 1, COLUMNS)
            mask = torch.zeros(height, width, len(of), 1, ROWS, COLUMNS, device=device)
            mask.masked_fill_(column >= seen.view(height, 1, len(of), 1, ROWS, 1), -torch.inf)
            found.append(Group(rows, results, columns_, mask))
    return found


def runs_of(segments: Segments, tail: tuple[Ints, Ints], cached: Ints, own: Ints) -> Runs:
    """Return the runs of a forward: the rows of a chain, and of the masks behind its end, are one.

    Args:
        segments, tail: of the forward.
        cached, own: ``[G]`` columns that segments see, cached ones and then their own.
    """
    if len(own) == 1:  # one sequence with one chain: what is below takes a while even for it
        return Runs(np.zeros(1, np.int64), np.full(1, -1), segments.rows)
    place = np.where(tail[1] > 0, tail[0], segments.shared_base)  # whose columns these are
    key = (place << 32) + cached
    bare, further = np.flatnonzero(own == 0), np.flatnonzero(own > 0)
    _, first, second = np.intersect1d(key[bare], key[further], return_indices=True)
    front = np.full(len(key), -1)
    front[further[second]] = bare[first]
    segment = np.delete(np.arange(len(key)), bare[first])
    front = front[segment]
    return Runs(segment, front, segments.rows[segment] + np.where(front >= 0, segments.rows[front], 0))


def alike(row_tiles: Ints, column_tiles: Ints) -> list[tuple[Ints, int, int]]:
    """Return groups of segments and the numbers of tiles that they are padded to, the widest first.

    Padding costs products, and a further group costs launches: a group joins the one before where that costs less.
    """
    if len(row_tiles) == 1:
        return [(np.zeros(1, np.int64), int(row_tiles[0]), int(column_tiles[0]))]
    shapes, of = np.unique(np.stack([column_tiles, row_tiles], 1), axis=0, return_inverse=True)
    found: list[tuple[Ints, int, int]] = []
    for number in range(len(shapes) - 1, -1, -1):
        members = np.flatnonzero(of.ravel() == number)
        width, height = shapes[number].tolist()
        if found:
            others, taller, wider = found[-1]
            tallest = max(height, taller)
            added = len(members) * (tallest * wider - height * width) + len(others) * (tallest - taller) * wider
            if added <= FEW_PRODUCTS:
                found[-1] = np.append(others, members), tallest, wider
                continue
        found.append((members, height, width))
    return found


def slots_of(segments: Segments, tail: tuple[Ints, Ints], of: Ints, columns: Ints) -> Ints:
    """Return the pool slots of columns: a segment's first cached range, then its second, then its own rows."""
    shared, both = segments.shared[of], (segments.shared + tail[1])[of]
    own = segments.own_base[of] + columns - both
    second = tail[0][of] + columns - shared
    return np.where(columns < shared, segments.shared_base[of] + columns, np.where(columns < both, second, own))


def stacked(
    segments: Segments, cached: Ints, runs: Runs, of: Ints, height: int, total: int, heads: int, kv_heads: int
) -> tuple[Ints, Ints, Ints]:
    """Return `Group.rows`, `Group.results`, and how many columns each row sees, ``[row tiles, G, ROWS]``; all flat."""
    group, place = heads // kv_heads, np.arange(height * ROWS).reshape(height, 1, ROWS)
    offset, head = np.minimum(place // group, runs.rows[of, None] - 1), place % group
    segment, front = runs.segment[of, None], runs.front[of, None]
    before = np.where(front >= 0, segments.rows[front], 0)
    row = offset + np.where(offset < before, segments.start[front], segments.start[segment] - before)
    seen = (cached[segment] if segments.seen is None else segments.seen[row]) + segments.hi[row]
    numbers = row[:, :, None] * heads + np.arange(kv_heads)[:, None] * group + head[:, :, None]
    there = (place // group < runs.rows[of, None])[:, :, None]  # [row tiles, G, 1, ROWS]
    return numbers.ravel(), np.where(there, numbers, total * heads).ravel(), seen.ravel()


def attend_exact(q: Tensor, keys: Tensor, values: Tensor, groups: list[Group]) -> Tensor:
    """As `attend_plain`, with `plan`'s groups; ``q [R', H, D]``, rows in no segment give 0."""
    total, heads, dim = q.shape
    flat_q, flat_k, flat_v = q.reshape(-1, dim) * dim**-0.5, keys.view(-1, dim), values.view(-1, dim)
    out = q.new_zeros(total * heads + 1, dim)
    for group in groups:
        height, width, count, _, _, _ = group.mask.shape
        query = flat_q.index_select(0, group.rows).view(height, 1, -1, ROWS, dim).expand(-1, width, -1, -1, -1)
        k, v = (x.index_select(0, group.columns).view(-1, COLUMNS, dim) for x in (flat_k, flat_v))
        scores = products(query, k.transpose(1, 2)).float()
        by_segment = scores.view(height, width, count, -1, ROWS, COLUMNS).add_(group.mask)
        by_segment -= by_segment.amax((1, 5), keepdim=True)
        weights = torch.threshold_(scores.clamp_(min=FAR).exp_(), NOTHING, 0)
        result = in_order(products(weights.to(v.dtype), v).float())
        result /= in_order(weights).sum(-1, keepdim=True)
        out.index_copy_(0, group.results, result.reshape(-1, dim).to(out.dtype))
    return out[:-1].view(q.shape)


def products(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a[t, w, n] @ b[w, n]`` for all of them: ``[T, W, N, ROWS, K], [W * N, K, M] -> [T, W, N, ROWS, M]``."""
    out = a.new_empty(*a.shape[:4], b.shape[2])
    for rows, result in zip(a, out, strict=True):
        torch.bmm(rows.flatten(0, 1), b, out=result.flatten(0, 1))
    return out


def in_order(x: Tensor) -> Tensor:
    """Return the sum along dimension 1, from its first number to its last; `x` is changed.

    So zeros behind the last number change no bit, however many there are.
    """
    first, *others = x.unbind(1)
    for other in others:
        first += other
    return first
