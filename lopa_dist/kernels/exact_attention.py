"""Attention whose bits follow from what a row sees, and from nothing else.

A causal model's text must not depend on how many rows are verified in one forward. So a row has to add up the same
numbers in the same order, whether it runs alone or behind drafts, and wherever the border between cached tokens and the
rows of this forward lies. Three things give that by construction:

- columns are cut into tiles of `COLUMNS`, from the sequence's first token on, and every product has one fixed shape,
  ``[ROWS, D] x [D, COLUMNS]``, then ``[ROWS, COLUMNS] x [COLUMNS, D]``;
- weights of columns that a row does not see are exactly 0, and so is all that follows from them;
- tiles are added pairwise: (0 + 1) + (2 + 3), and so on. More tiles add zeros to a sum that is finished.

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
MOST_COLUMNS = 1 << 17  # gathered at once, of all segments together: it bounds memory
NOTHING = -60.0  # a score so far below the row's best one has weight 0: it is far less than a rounding error, and a CPU
# takes a hundred times as long for the tiny numbers that would follow from it
FEW_PRODUCTS = 256  # so many more cost less than another group


@dataclass
class Group:
    """Segments that are computed together, and padded to the same numbers of row tiles and column tiles.

    Query heads that share a K/V head are stacked as rows. Rows are numbered as in ``q.view(R * H, D)``, columns as in
    ``keys.view(slots * Hkv, D)``.
    """

    rows: Tensor  # [row tiles * G * Hkv * ROWS] of q; any row where there is none
    results: Tensor  # [row tiles * G * Hkv * ROWS] likewise; R * H, which nobody reads, where there is none
    columns: Tensor  # [G * Hkv * column tiles * COLUMNS] of keys and values
    mask: Tensor  # [row tiles, G, 1, column tiles, ROWS, COLUMNS] fp32: -inf for what is not seen, else 0


def plan(segments: Segments, total: int, heads: int, kv_heads: int, device: torch.device) -> list[Group]:
    """Group segments, once per forward; every layer uses the result.

    A row sees a beginning of its segment's columns: cached tokens, then own ones.

    Args:
        segments: of the forward.
        total: packed rows, padding included.
        heads, kv_heads: the model's, on this rank.
        device: of the tensors.

    Raises:
        ValueError: rows that see something else (`Segments.lo`).
    """
    if segments.lo is not None:
        raise ValueError("exact attention takes rows that see a beginning of their columns, not an interval")
    if not len(segments.rows):
        return []
    tail = segments.tail or (np.zeros_like(segments.shared), np.zeros_like(segments.shared))
    cached = segments.shared + tail[1]
    own = np.maximum.reduceat(segments.hi, segments.start)
    last = np.maximum(cached + own, 1) - 1  # the last column that some row of a segment sees
    row_tiles = -(-segments.rows * (heads // kv_heads) // ROWS)
    column_tiles = last // COLUMNS + 1
    found = []
    for some, height, width in alike(row_tiles, column_tiles):
        most = max(1, MOST_COLUMNS // (width * COLUMNS))
        for begin in range(0, len(some), most):
            of = some[begin : begin + most]
            columns = np.minimum(np.arange(width * COLUMNS), last[of, None])
            slots = slots_of(segments, tail, of[:, None], columns)
            by_head = slots[:, None] * kv_heads + np.arange(kv_heads)[:, None]
            parts = *stacked(segments, cached, of, height, total, heads, kv_heads), by_head.ravel()
            rows, results, seen, columns_ = (to_device(part, device) for part in parts)
            column = torch.arange(width * COLUMNS, device=device).view(width, 1, COLUMNS)
            mask = torch.zeros(height, len(of), 1, width, ROWS, COLUMNS, device=device)
            mask.masked_fill_(column >= seen.view(height, len(of), 1, 1, ROWS, 1), -torch.inf)
            found.append(Group(rows, results, columns_, mask))
    return found


def alike(row_tiles: Ints, column_tiles: Ints) -> list[tuple[Ints, int, int]]:
    """Return groups of segments and the numbers of tiles that they are padded to, the widest first.

    Padding costs products, and a further group costs launches: a group joins the one before where that costs less.
    """
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
    segments: Segments, cached: Ints, of: Ints, height: int, total: int, heads: int, kv_heads: int
) -> tuple[Ints, Ints, Ints]:
    """Return `Group.rows`, `Group.results`, and how many columns each row sees, ``[row tiles, G, ROWS]``; all flat."""
    group, place = heads // kv_heads, np.arange(height * ROWS).reshape(height, 1, ROWS)
    offset, head = place // group, place % group
    length = segments.rows[of, None]
    there = offset < length  # [row tiles, G, ROWS]
    row = segments.start[of, None] + np.minimum(offset, length - 1)
    seen = (cached[of, None] if segments.seen is None else segments.seen[row]) + segments.hi[row]
    numbers = row[:, :, None] * heads + np.arange(kv_heads)[:, None] * group + head[:, :, None]
    return numbers.ravel(), np.where(there[:, :, None], numbers, total * heads).ravel(), seen.ravel()


def attend_exact(q: Tensor, keys: Tensor, values: Tensor, groups: list[Group]) -> Tensor:
    """As `attend_plain`, with `plan`'s groups; ``q [R', H, D]``, rows in no segment give 0."""
    total, heads, dim = q.shape
    flat_q, flat_k, flat_v = q.reshape(-1, dim) * dim**-0.5, keys.view(-1, dim), values.view(-1, dim)
    out = q.new_zeros(total * heads + 1, dim)
    for group in groups:
        height, count, _, width, _, _ = group.mask.shape
        query = flat_q.index_select(0, group.rows).view(height, -1, 1, ROWS, dim).expand(-1, -1, width, -1, -1)
        k, v = (x.index_select(0, group.columns).view(-1, COLUMNS, dim) for x in (flat_k, flat_v))
        scores = products(query.reshape(height, -1, ROWS, dim), k.transpose(1, 2)).float()
        scores = scores.view(height, count, -1, width, ROWS, COLUMNS)
        scores += group.mask
        scores.sub_(scores.amax((3, 5), keepdim=True))
        weights = torch.threshold_(scores, NOTHING, -torch.inf).exp_().view(height, -1, ROWS, COLUMNS)
        parts = products(weights.to(v.dtype), v).float().view(height, -1, width, ROWS, dim)
        norm = pairwise(pairwise(weights, 3).view(height, -1, width, ROWS), 2)
        result = pairwise(parts, 2).div_(norm[..., None])
        out.index_copy_(0, group.results, result.view(-1, dim).to(out.dtype))
    return out[:-1].view(q.shape)


def products(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a[t, i] @ b[i]`` for all t and i: ``[T, N, ROWS, K], [N, K, M] -> [T, N, ROWS, M]``."""
    out = a.new_empty(*a.shape[:3], b.shape[2])
    for rows, result in zip(a, out, strict=True):
        torch.bmm(rows, b, out=result)
    return out


def pairwise(x: Tensor, dim: int) -> Tensor:
    """Return the sum along `dim`: neighbours are added, then neighbouring sums; one without a neighbour waits.

    So zeros behind the last number change no bit, however many there are.
    """
    while (length := x.shape[dim]) > 1:
        even, odd = x.narrow(dim, 0, length - length % 2).unflatten(dim, (-1, 2)).unbind(dim + 1)
        added = even + odd
        x = torch.cat([added, x.narrow(dim, length - 1, 1)], dim) if length % 2 else added
    return x.squeeze(dim)
