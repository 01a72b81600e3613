"""Attention over segments: runs of query rows that share a K/V view.

A row sees the cached tokens of its sequence and the first `hi` columns of its own segment. This one rule covers
prompts, full windows, block-causal windows and stacked branches (XY-Serve's length per row, section 3). Rows of drafts
stand in for other rows of their segment, which they must not see: a column is seen only by rows whose depth is below
its `until` (`rows.draft_rows`). A segment may see a second cached range, its tail: with a dual cache, the tokens after
it. There are two implementations: the plain reference takes one segment at a time, the grouped one runs segments of
equal shape together.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lopa_dist.ragged import UNBOUNDED, Ints, ragged_arange

COLUMN_TILE = 32  # K/V columns are padded to a multiple of this, which depends only on the segment's own length
QUERY_TILE = 8  # query rows likewise: with odd counts, the bits of torch's CPU kernel depend on the thread


@dataclass
class Segments:
    """Where each segment's rows and K/V are, as numpy arrays on the host; [G] per segment, [R] per row."""

    start: Ints  # [G] first query row
    rows: Ints  # [G] query rows, consecutive
    shared_base: Ints  # [G] pool slot of the sequence's first cached token
    shared: Ints  # [G] cached tokens seen
    own_base: Ints  # [G] pool slot of the segment's own first row
    hi: Ints  # [R] how many own columns each row sees
    tail: tuple[Ints, Ints] | None = None  # [G] a second range: its first pool slot and its number of cached tokens
    # [R] cached tokens that each row sees, of both ranges; None: all of its segment's. A row that does not see all of
    # them sees no own column
    seen: Ints | None = None
    # [R] each row's depth; and [R] on the device, for each row's column, the depth below which rows see it. None: every
    # row sees all of its columns up to `hi`
    drafts: tuple[Ints, Tensor] | None = None


def attend_plain(q: Tensor, keys: Tensor, values: Tensor, segments: Segments) -> Tensor:
    """Return attention, as the reference: ``q [R', H, D]``, pools ``[slots, Hkv, D]`` -> ``[R', H, D]``.

    Rows in no segment give 0. It computes in fp32, or in fp64 if q is fp64.
    """
    out, wide = torch.zeros_like(q), torch.promote_types(q.dtype, torch.float32)
    repeat = q.shape[1] // keys.shape[1]
    for g, start in enumerate(segments.start):
        n, shared = int(segments.rows[g]), int(segments.shared[g])
        base, own = int(segments.shared_base[g]), int(segments.own_base[g])
        tail_base, tail = (int(x[g]) for x in segments.tail) if segments.tail else (0, 0)
        ranges = (slice(base, base + shared), slice(tail_base, tail_base + tail), slice(own, own + n))
        k = torch.cat([keys[r] for r in ranges]).repeat_interleave(repeat, 1)
        v = torch.cat([values[r] for r in ranges]).repeat_interleave(repeat, 1)
        hi = torch.from_numpy(segments.hi[start : start + n]).to(q.device)[:, None]
        column = torch.arange(shared + tail + n, device=q.device) - shared - tail
        visible = (column < 0) | (column < hi)
        if segments.drafts is not None:
            depth, until = (torch.as_tensor(x[start : start + n], device=q.device) for x in segments.drafts)
            visible[:, shared + tail :] &= depth[:, None] < until
        if segments.seen is not None:
            seen = torch.from_numpy(segments.seen[start : start + n]).to(q.device)[:, None]
            visible = visible & ((column >= 0) | (column + shared + tail < seen))
        scores = torch.einsum("rhd,chd->hrc", q[start : start + n].to(wide), k.to(wide)) * q.shape[2] ** -0.5
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        out[start : start + n] = torch.einsum("hrc,chd->rhd", weights, v.to(wide)).to(q.dtype)
    return out


@dataclass
class SegmentGroup:
    """Segments of one shape, as index tensors."""

    count: int  # N, the number of segments
    rows: Tensor  # [N x n] query rows
    columns: Tensor  # [N x C] pool slots
    # [N, 1, n x heads per K/V head, rounded up, C] -inf for what is not seen, else 0; one row if all rows are alike
    mask: Tensor
    first_rows: bool  # whether the rows are the forward's first ones, in order


def plan(segments: Segments, heads_per_kv: int, device: torch.device, dtype: torch.dtype) -> list[SegmentGroup]:
    """Return segments grouped by (rows, padded columns), once per forward; every layer uses them, with q of `dtype`.

    Padding columns repeat the segment's last column, which always holds a number, and are never visible. The query
    heads that share a K/V head are stacked as rows, so K/V are never repeated.
    """
    if not len(segments.rows):
        return []
    own = segments.rows  # columns that any row of a segment sees
    final = segments.hi[segments.start + segments.rows - 1]
    alike = np.minimum.reduceat(segments.hi, segments.start) == final  # one row of the mask serves the whole segment
    depth, until = None, None
    if segments.drafts is not None:
        own, by_start = np.zeros_like(own), np.argsort(segments.start)
        own[by_start] = np.maximum.reduceat(segments.hi, segments.start[by_start])
        depth, until = segments.drafts
        until = F.pad(until, (0, 1), value=UNBOUNDED)  # cached tokens are seen at every depth
    # the ranges that a segment's columns come from: their lengths, and the offsets of slots from columns
    cached, lengths, offsets = segments.shared, [segments.shared], [segments.shared_base]
    if segments.tail is not None:
        lengths.append(segments.tail[1])
        offsets.append(segments.tail[0] - cached)
        cached = cached + segments.tail[1]
    last = cached + own - 1  # the last column that is not padding
    columns = (last // COLUMN_TILE + 1) * COLUMN_TILE
    length, offset = np.array([*lengths, columns - cached]).T, np.array([*offsets, segments.own_base - cached]).T

    # rows and columns of all segments, one group after the other
    shapes = ((segments.rows << 32) + columns) * 2 + alike
    order = shapes.argsort(kind="stable")
    n, c = segments.rows[order], columns[order]
    rows = segments.start[order].repeat(n) + ragged_arange(n)
    at = offset[order].ravel().repeat(length[order].ravel())
    at += np.minimum(ragged_arange(c), last[order].repeat(c))
    hi = segments.hi[rows].astype(np.int32)
    groups, segment, row, column = [], 0, 0, 0
    for shape, count in Counter(shapes[order].tolist()).items():
        of = order[segment : segment + count]
        height, width = shape >> 33, (shape >> 1) & 0xFFFFFFFF
        of_rows = slice(row, row + count * height)
        of_columns = slice(column, column + count * width)
        segment, row, column = segment + count, of_rows.stop, of_columns.stop
        if shape & 1:
            unseen = (np.arange(width) >= (cached + final)[of, None])[:, None, None]
        else:
            own_column = (np.arange(width) - cached[of, None]).astype(np.int32)[:, None]  # negative where cached
            unseen = own_column >= hi[of_rows].reshape(count, height, 1)
            stacked = np.arange(-(-height * heads_per_kv // QUERY_TILE) * QUERY_TILE) % height
            unseen = unseen.take(stacked, 1)[:, None]
        of_group = rows[of_rows]
        mask = torch.from_numpy(np.where(unseen, np.float32(-np.inf), np.float32(0))).to(device, dtype)
        if depth is not None and until is not None and (depths := depth[of_group].reshape(count, height)).any():
            row_of = np.minimum(np.arange(width) - cached[of, None], own[of, None] - 1)
            row_of = np.where(row_of < 0, len(depth), row_of + segments.start[of, None])
            of_column = until.index_select(0, torch.from_numpy(row_of.ravel()).to(device)).view(count, 1, 1, width)
            replaced = torch.from_numpy(depths[:, stacked]).to(device)[:, None, :, None] >= of_column
            mask.masked_fill_(replaced, -torch.inf)
        first_rows = np.array_equal(of_group, np.arange(len(of_group)))
        indices = torch.from_numpy(of_group).to(device), torch.from_numpy(at[of_columns]).to(device)
        groups.append(SegmentGroup(count, *indices, mask, first_rows))
    return groups


def attend_grouped(q: Tensor, keys: Tensor, values: Tensor, groups: list[SegmentGroup]) -> Tensor:
    """Compute what `attend_plain` does, with `plan`'s groups. A row's bits do not depend on other segments."""
    if len(groups) == 1 and groups[0].first_rows and groups[0].rows.shape[0] == q.shape[0]:
        return attend_group(q, keys, values, groups[0])
    out = torch.zeros_like(q)
    for group in groups:
        out.index_copy_(0, group.rows, attend_group(q.index_select(0, group.rows), keys, values, group))
    return out


def attend_group(q: Tensor, keys: Tensor, values: Tensor, group: SegmentGroup) -> Tensor:
    """Compute `attend_grouped` for the rows of one group, ``q [N x n, H, D]``."""
    count, n, (kv_heads, dim) = group.count, q.shape[0] // group.count, keys.shape[1:]
    # whole rows by index_select: indexing takes twice as long
    k = keys.index_select(0, group.columns).view(count, -1, kv_heads, dim).transpose(1, 2)
    v = values.index_select(0, group.columns).view(count, -1, kv_heads, dim).transpose(1, 2)
    query = q.view(count, n, kv_heads, -1, dim).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [N, Hkv, heads x n, D]
    stacked = query.shape[2]
    extra = -stacked % QUERY_TILE
    if extra:
        query = F.pad(query, (0, 0, 0, extra))
    result = F.scaled_dot_product_attention(query, k, v, group.mask)
    if extra:
        result = result[:, :, :stacked]
    return result.reshape(count, kv_heads, -1, n, dim).permute(0, 3, 1, 2, 4).reshape(count * n, -1, dim)
