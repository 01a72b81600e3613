"""Attention in which a row's bits depend only on what the row sees.

A causal model's text must not depend on how many rows are verified in one forward. So a row must sum the same numbers
in the same order, whether it runs alone or after drafts, and wherever the border between cached tokens and the rows of
this forward lies. Three rules guarantee that by construction:

- columns are cut into tiles of `COLUMNS`, from the sequence's first token on, and every product has one fixed shape,
  ``[ROWS, D] x [D, COLUMNS]``, then ``[ROWS, COLUMNS] x [COLUMNS, D]``;
- weights of columns that a row does not see are exactly 0, and so are their contributions;
- tiles are added in order, and those after the last one that a row sees add zeros to a finished sum.

The rest is what every batched engine relies on: in a product of fixed shape, a matrix library gives a row the same bits
in any place (docs/architecture.md, "Why batch, rank and order do not matter").
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from lopa_dist.kernels.segment_attention import Segments
from lopa_dist.ragged import Ints
from lopa_dist.staging import together

ROWS, COLUMNS = 8, 32  # of the products: query rows (with stacked heads) and K/V columns
MOST_SCORES = 1 << 17  # per group: they and their K/V stay in a core's cache, and memory is bounded
FAR = -60.0  # lower scores, relative to the row's best, are raised to this: a CPU's exp takes 20 times as long there
NOTHING = 1e-26  # weights up to this, slightly more than e^FAR, become 0: they are far below a rounding error
FEW_PRODUCTS = 32  # up to this many extra pairs of row tile and column tile cost less than another group


@dataclass
class Group:
    """Runs of rows that are computed together, the widest first, padded to the same number of row tiles.

    Query heads that share a K/V head are stacked as rows. Rows are numbered as in ``q.view(R * H, D)``, columns as in
    ``keys.view(slots * Hkv, D)``. There are G runs. A column tile has only the runs that reach it, which are the first
    ones. P is the number of pairs of a column tile and a run that reaches it.
    """

    rows: Tensor  # [row tiles * G * Hkv * ROWS] rows of q; padding repeats a row
    results: Tensor  # [row tiles * G * Hkv * ROWS] rows of the result; R * H, which is never read, for padding
    columns: Tensor  # [P * Hkv * COLUMNS] rows of keys and values
    mask: Tensor  # [row tiles, P, 1, ROWS, COLUMNS] fp32: -inf for what is not seen, else 0
    blocks: list[tuple[int, int]]  # per sequence of column tiles that the same runs reach: (tiles, products per tile)
    counts: list[int]  # products per column tile


@dataclass
class Runs:
    """Rows of one or two segments that are computed together because they see the same columns."""

    segment: Ints  # [U] the segment whose columns they see
    front: Ints  # [U] the segment whose rows come first, which see only cached columns; -1: none
    rows: Ints  # [U] number of rows of both


def plan(segments: Segments, total: int, heads: int, kv_heads: int, device: torch.device) -> list[Group]:
    """Return a forward's segments in groups, made once per forward and used by every layer.

    A row sees the beginning of its segment's columns: cached tokens, then own ones.

    Args:
        segments: the forward's.
        total: packed rows, padding included.
        heads, kv_heads: the model's, on this rank.
        device: the tensors'.

    Raises:
        ValueError: rows see something else (`Segments.drafts`).
    """
    if segments.drafts is not None:
        raise ValueError("exact attention takes rows that see a beginning of their columns, without gaps")
    if not len(segments.rows):
        return []
    tail = segments.tail or (np.zeros_like(segments.shared), np.zeros_like(segments.shared))
    cached = segments.shared + tail[1]
    own = np.maximum.reduceat(segments.hi, segments.start)
    runs = runs_of(segments, tail, cached, own)
    last = np.maximum(cached + own, 1)[runs.segment] - 1  # the last column that any row of a run sees
    row_tiles = -(-runs.rows * (heads // kv_heads) // ROWS)
    column_tiles = last // COLUMNS + 1
    found = []
    for some, height in alike(row_tiles, column_tiles):
        some = some[np.argsort(-column_tiles[some], kind="stable")]
        scores = column_tiles[some].cumsum() * (height * kv_heads * ROWS * COLUMNS)
        for of in np.split(some, np.flatnonzero(np.diff((scores - 1) // MOST_SCORES)) + 1):
            reached = column_tiles[of] > np.arange(column_tiles[of[0]])[:, None]
            tile, run = np.nonzero(reached)  # [P]
            numbers = tile[:, None] * COLUMNS + np.arange(COLUMNS)
            segment = of[run][:, None]
            slots = slots_of(segments, tail, runs.segment[segment], np.minimum(numbers, last[segment]))
            by_head = slots[:, None] * kv_heads + np.arange(kv_heads)[:, None]
            rows, results, seen = stacked(segments, cached, runs, of, height, total, heads, kv_heads)
            seen = seen.reshape(height, len(of), ROWS)[:, run] - tile[:, None] * COLUMNS  # relative to each tile
            sent = together(device, rows=rows, results=results, columns=by_head.ravel(), seen=seen.ravel())
            hidden = torch.arange(COLUMNS, device=device) >= sent.pop("seen").view(height, -1, 1, ROWS, 1)
            mask = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -torch.inf)
            counts = (reached.sum(1) * kv_heads).tolist()
            blocks = [(len(list(same)), count) for count, same in groupby(counts)]
            found.append(Group(**sent, mask=mask, blocks=blocks, counts=counts))
    return found


def runs_of(segments: Segments, tail: tuple[Ints, Ints], cached: Ints, own: Ints) -> Runs:
    """Return a forward's runs; a chain and the masks after its end form one run.

    Args:
        segments, tail: the forward's.
        cached, own: ``[G]`` how many cached and own columns each segment sees.
    """
    if len(own) == 1:  # one sequence with one chain: spare it the code below, which takes a while
        return Runs(np.zeros(1, np.int64), np.full(1, -1), segments.rows)
    place = np.where(tail[1] > 0, tail[0], segments.shared_base)  # says whose columns these are
    key = (place << 32) + cached
    bare, further = np.flatnonzero(own == 0), np.flatnonzero(own > 0)
    if not len(bare) or not len(further):
        return Runs(np.arange(len(key)), np.full(len(key), -1), segments.rows)
    _, first, second = np.intersect1d(key[bare], key[further], return_indices=True)
    front = np.full(len(key), -1)
    front[further[second]] = bare[first]
    segment = np.delete(np.arange(len(key)), bare[first])
    front = front[segment]
    return Runs(segment, front, segments.rows[segment] + np.where(front >= 0, segments.rows[front], 0))


def alike(row_tiles: Ints, column_tiles: Ints) -> list[tuple[Ints, int]]:
    """Return groups of runs, each with the number of row tiles that it is padded to, the tallest first.

    Padding costs products, and another group costs launches: a group joins the one before it where that costs less.
    """
    if len(row_tiles) == 1:
        return [(np.zeros(1, np.int64), int(row_tiles[0]))]
    found: list[tuple[Ints, int]] = []
    for height in np.unique(row_tiles)[::-1].tolist():
        members = np.flatnonzero(row_tiles == height)
        if found:
            others, higher = found[-1]
            if column_tiles[members].sum() * (higher - height) <= FEW_PRODUCTS:
                found[-1] = np.append(others, members), higher
                continue
        found.append((members, height))
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
    """Return, all flat: `Group.rows`, `Group.results`, and how many columns each row sees, ``[row tiles, G, ROWS]``."""
    group, place = heads // kv_heads, np.arange(height * ROWS).reshape(height, 1, ROWS)
    offset, head = np.minimum(place // group, runs.rows[of, None] - 1), place % group
    segment, front = runs.segment[of, None], runs.front[of, None]
    before = np.where(front >= 0, segments.rows[front], 0)
    row = offset + np.where(offset < before, segments.start[front], segments.start[segment] - before)
    seen = (cached[segment] if segments.seen is None else segments.seen[row]) + segments.hi[row]
    numbers = row[:, :, None] * heads + np.arange(kv_heads)[:, None] * group + head[:, :, None]
    there = (place // group < runs.rows[of, None])[:, :, None]  # [row tiles, G, 1, ROWS]
    return numbers.ravel(), np.where(there, numbers, total * heads).ravel(), seen.ravel()


class Room:
    """Buffers for intermediate results: allocating megabytes anew in every layer takes longer."""

    def __init__(self) -> None:
        self.of: dict[str, Tensor] = {}  # by name
        self.last: dict[str, Tensor] = {}  # what was taken last, which is usually taken again

    def take(self, name: str, like: Tensor, *shape: int) -> Tensor:
        """Return an uninitialised tensor of this shape, with `like`'s dtype and device."""
        last = self.last.get(name)
        if last is not None and last.shape == shape and last.dtype == like.dtype and last.device == like.device:
            return last
        size, found = math.prod(shape), self.of.get(name)
        if found is None or len(found) < size or found.dtype != like.dtype or found.device != like.device:
            with torch.inference_mode(False):
                found = self.of[name] = torch.empty(size, dtype=like.dtype, device=like.device)
        self.last[name] = found[:size].view(shape)
        return self.last[name]


def attend_exact(q: Tensor, keys: Tensor, values: Tensor, groups: list[Group], room: Room | None = None) -> Tensor:
    """Compute what `attend_plain` does, with `plan`'s groups; ``q [R', H, D]``, rows in no segment give 0."""
    room = room or Room()
    total, heads, dim = q.shape
    kv_heads = keys.shape[1]
    flat_q = (q * dim**-0.5).reshape(-1, dim)
    flat_k, flat_v = keys.view(-1, dim), values.view(-1, dim)
    out = q.new_zeros(total * heads + 1, dim)
    for group in groups:
        height, pairs = group.mask.shape[:2]
        query = flat_q.index_select(0, group.rows).view(height, -1, ROWS, dim)
        tile = room.take("tile", keys, pairs * kv_heads, COLUMNS, dim)
        columns = tile.view(-1, dim)
        torch.index_select(flat_k, 0, group.columns, out=columns)
        scores = room.take("scores", q, height, pairs * kv_heads, ROWS, COLUMNS)
        begin = 0
        for tiles, count in group.blocks:
            end = begin + tiles * count
            k = tile[begin:end].transpose(1, 2)
            for row_tile in range(height):
                repeated = query[row_tile, :count].expand(tiles, -1, -1, -1).flatten(0, 1)
                torch.bmm(repeated, k, out=scores[row_tile, begin:end])
            begin = end
        weights = scores.float()
        weights.view(height, pairs, kv_heads, ROWS, COLUMNS).add_(group.mask)
        subtract_best(weights, group.blocks)
        torch.threshold_(weights.clamp_(min=FAR).exp_(), NOTHING, 0)
        torch.index_select(flat_v, 0, group.columns, out=columns)
        results = room.take("results", values, height, pairs * kv_heads, ROWS, dim)
        rounded = weights.to(values.dtype)
        for row_tile in range(height):
            torch.bmm(rounded[row_tile], tile, out=results[row_tile])
        attended = in_order(results.float(), group.counts)
        attended.div_(in_order(weights, group.counts).sum(-1, keepdim=True))
        out.index_copy_(0, group.results, attended.reshape(-1, dim).to(out.dtype))
    return out[:-1].view(q.shape)


def subtract_best(scores: Tensor, blocks: list[tuple[int, int]]) -> None:
    """Subtract each row's highest score from its scores ``[row tiles, P * Hkv, ROWS, COLUMNS]``, in place."""
    height, parts = scores.shape[0], scores.split_with_sizes([tiles * count for tiles, count in blocks], 1)
    by_tile = [part.view(height, *block, ROWS, COLUMNS) for part, block in zip(parts, blocks, strict=True)]
    first, *others = [part.amax((1, 4), keepdim=True) for part in by_tile]
    for other in others:
        of = first[:, :, : other.shape[2]]
        torch.maximum(of, other, out=of)
    for part in by_tile:
        part.sub_(first[:, :, : part.shape[2]])


def in_order(x: Tensor, counts: list[int]) -> Tensor:
    """Return the sum over column tiles, from the first to the last; overwrites `x`.

    A run's sum ends with the last tile that it reaches. Adding zeros after that would change no bit.

    Args:
        x: ``[row tiles, P * Hkv, ...]``.
        counts: as in `Group`.
    """
    first, *others = x.split_with_sizes(counts, 1)
    for other, count in zip(others, counts[1:], strict=True):
        (first if count == counts[0] else first[:, :count]).add_(other)
    return first
