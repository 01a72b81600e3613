"""The Triton kernels of meta-attention: one attends for a tile and a K/V head, the other merges a tile's parts.

Query heads that share a K/V head are stacked as rows of one matrix: matrix row i is query row ``i // G`` and head
``i % G`` of its group, so G need not be a power of two. Softmax uses powers of two; the scale includes log2(e).
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e30)  # initial running maximum: finite, so that rows that see nothing yet give no NaN


@triton.jit
def soften(scores, values, total, norm, peak, scale, PRECISION: tl.constexpr):
    """Return the sum of values, the sum of weights and the maximum after one more step of the online softmax."""
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores * scale - (new_peak * scale)[:, None])
    fade = tl.exp2((peak - new_peak) * scale)
    norm = norm * fade + tl.sum(weights, 1)
    total = tl.dot(weights.to(values.dtype), values, total * fade[:, None], input_precision=PRECISION)
    return total, norm, new_peak


@triton.jit(do_not_specialize=["scratch"])
def attend_kernel(
    q, keys, values, out, partial, partial_lse, table, seen, lo, hi, depth, until, counts, scratch, scale,
    q_row, q_head, k_slot, k_head, v_slot, v_head, out_row, out_head,
    G: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_TILE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    STAGES: tl.constexpr, BOUNDED: tl.constexpr, WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend for each pair of tile and K/V head. If BOUNDED, any number of programs loop over the pairs.

    Otherwise the grid is as large as the table, and programs beyond the last tile return at once.
    """
    own = tl.program_id(0)
    items = tl.load(counts) * KV_HEADS
    if BOUNDED:
        for item in tl.range(own, items, tl.num_programs(0), num_stages=1):
            attend_tile(
                item // KV_HEADS, item % KV_HEADS, q, keys, values, out, partial, partial_lse, table, seen, lo, hi,
                depth, until, scratch, scale, q_row, q_head, k_slot, k_head, v_slot, v_head, out_row, out_head,
                G, KV_HEADS, D, D_TILE, BM, BN, STAGES, BOUNDED, WHOLE, PRECISION,
            )  # fmt: skip
    else:
        if own >= items:
            return
        attend_tile(
            own // KV_HEADS, own % KV_HEADS, q, keys, values, out, partial, partial_lse, table, seen, lo, hi,
            depth, until, scratch, scale, q_row, q_head, k_slot, k_head, v_slot, v_head, out_row, out_head,
            G, KV_HEADS, D, D_TILE, BM, BN, STAGES, BOUNDED, WHOLE, PRECISION,
        )  # fmt: skip


@triton.jit
def attend_tile(
    tile, kv_head, q, keys, values, out, partial, partial_lse, table, seen, lo, hi, depth, until, scratch, scale,
    q_row, q_head, k_slot, k_head, v_slot, v_head, out_row, out_head,
    G: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_TILE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    STAGES: tl.constexpr, BOUNDED: tl.constexpr, WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend for one tile's rows and the query heads of one K/V head."""
    entry = table + tile * 12
    q0 = tl.load(entry)
    rows = tl.load(entry + 1)
    s0_base = tl.load(entry + 2)
    s0_len = tl.load(entry + 3)
    s1_base = tl.load(entry + 4)
    s1_len = tl.load(entry + 5)
    c0 = tl.load(entry + 6)
    c1 = tl.load(entry + 7)
    part = tl.load(entry + 8)
    before = tl.load(entry + 9)

    i = tl.arange(0, BM)
    row = i // G
    head = kv_head * G + i % G
    valid = row < rows
    d = tl.arange(0, D_TILE)
    inside = d < D  # all true, so no mask, where D is a power of two
    at = (q0 + row).to(tl.int64)
    if BOUNDED:  # a tile may have rows of two segments
        first = tl.load(entry + 10)
        at = tl.where(row < first, q0 + row, tl.load(entry + 11) + row - first).to(tl.int64)
    query = tl.load(
        q + (at * q_row + head * q_head)[:, None] + d[None, :], mask=valid[:, None] & inside[None, :], other=0.0
    )
    keys += kv_head * k_head
    values += kv_head * v_head
    total = tl.zeros([BM, D_TILE], tl.float32)
    norm = tl.zeros([BM], tl.float32)
    peak = tl.full([BM], LOWEST, tl.float32)
    n = tl.arange(0, BN)

    if BOUNDED:
        # Steps begin at fixed tokens of the sequence, wherever the two ranges meet, own columns begin or a row's bound
        # lies, so each row sums in one order. A tile has rows of one segment, or of two that see the same cached
        # tokens, one of which has no own columns.
        cached = s0_len + s1_len
        columns = cached + c1 - c0
        bound = tl.load(seen + at, mask=valid, other=0) - before
        own_bound = tl.maximum(tl.load(hi + at, mask=valid, other=0) - c0, 0)
        # one bound for both, as only a row that sees all cached tokens sees own columns
        bound = tl.minimum(tl.minimum(tl.maximum(bound, 0), cached) + own_bound, columns)
        for start in tl.range(0, columns, BN, num_stages=STAGES):
            c = start + n
            slot = tl.where(c < s0_len, s0_base + c, s1_base + c - s0_len)
            slot = tl.where(c < cached, slot, scratch + c0 + c - cached).to(tl.int64)
            there = c < columns
            k = tl.load(keys + (slot * k_slot)[None, :] + d[:, None], mask=there[None, :] & inside[:, None], other=0.0)
            scores = tl.dot(query, k, input_precision=PRECISION)
            scores = tl.where(c[None, :] < bound[:, None], scores, float("-inf"))
            v = tl.load(
                values + (slot * v_slot)[:, None] + d[None, :], mask=there[:, None] & inside[None, :], other=0.0
            )
            total, norm, peak = soften(scores, v, total, norm, peak, scale, PRECISION)
    else:
        # whole blocks of cached tokens: every row sees all of them, so no mask. Where blocks begin then depends on
        # where the two ranges meet; without WHOLE it does not
        blocks0 = s0_len // BN if WHOLE else 0
        blocks1 = s1_len // BN if WHOLE else 0
        for block in tl.range(0, blocks0 + blocks1, num_stages=STAGES):
            base = tl.where(block < blocks0, s0_base + block * BN, s1_base + (block - blocks0) * BN).to(tl.int64)
            k = tl.load(keys + base * k_slot + n[None, :] * k_slot + d[:, None], mask=inside[:, None], other=0.0)
            scores = tl.dot(query, k, input_precision=PRECISION)
            v = tl.load(values + base * v_slot + n[:, None] * v_slot + d[None, :], mask=inside[None, :], other=0.0)
            total, norm, peak = soften(scores, v, total, norm, peak, scale, PRECISION)
        # the rest of both ranges, then the own columns; slots outside may hold NaN and are not read
        rest0 = s0_len - blocks0 * BN
        cached = rest0 + s1_len - blocks1 * BN
        columns = cached + c1 - c0
        row_lo = cached - c0 + tl.load(lo + at, mask=valid, other=0)
        # a part may end before the columns that its rows see
        row_hi = tl.minimum(cached - c0 + tl.load(hi + at, mask=valid, other=0), columns)
        row_depth = tl.load(depth + at, mask=valid, other=0)
        for start in tl.range(0, columns, BN, num_stages=STAGES):
            c = start + n
            slot = tl.where(c < rest0, s0_base + blocks0 * BN + c, s1_base + blocks1 * BN + c - rest0)
            slot = tl.where(c < cached, slot, scratch + c0 + c - cached).to(tl.int64)
            there = c < columns
            k = tl.load(keys + (slot * k_slot)[None, :] + d[:, None], mask=there[None, :] & inside[:, None], other=0.0)
            scores = tl.dot(query, k, input_precision=PRECISION)
            own_until = tl.load(until + c0 + c - cached, mask=there & (c >= cached), other=0)
            visible = (c[None, :] >= row_lo[:, None]) & (c[None, :] < row_hi[:, None])
            visible = (c < cached)[None, :] | (visible & (row_depth[:, None] < own_until[None, :]))
            scores = tl.where(visible, scores, float("-inf"))
            v = tl.load(
                values + (slot * v_slot)[:, None] + d[None, :], mask=there[:, None] & inside[None, :], other=0.0
            )
            total, norm, peak = soften(scores, v, total, norm, peak, scale, PRECISION)

    some = tl.where(norm > 0, norm, 1.0)
    result = total / some[:, None]  # 0 where a row sees nothing
    stored = valid[:, None] & inside[None, :]
    if part < 0:
        address = out + (at * out_row + head * out_head)[:, None] + d[None, :]
        tl.store(address, result.to(out.dtype.element_ty), mask=stored)
    else:
        place = (part * KV_HEADS + kv_head).to(tl.int64) * BM + i
        tl.store(partial + (place * D)[:, None] + d[None, :], result, mask=stored)
        tl.store(partial_lse + place, tl.where(norm > 0, peak * scale + tl.log2(some), float("-inf")), mask=valid)


@triton.jit
def merge_kernel(
    partial, partial_lse, out, merges, counts, out_row, out_head,
    G: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_TILE: tl.constexpr, BM: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Merge the parts of tiles' rows, weighted by their log-sum-exp. The grid has any number of programs."""
    strips: tl.constexpr = BM // ROWS
    items = tl.load(counts + 1) * KV_HEADS * strips
    for item in tl.range(tl.program_id(0), items, tl.num_programs(0), num_stages=1):
        merge = item // strips // KV_HEADS
        i = item % strips * ROWS + tl.arange(0, ROWS)
        merge_rows(
            i, item // strips % KV_HEADS, merges + merge * 6, partial, partial_lse, out, out_row, out_head,
            G, KV_HEADS, D, D_TILE, BM, ROWS,
        )  # fmt: skip


@triton.jit
def merge_rows(
    i, kv_head, entry, partial, partial_lse, out, out_row, out_head,
    G: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_TILE: tl.constexpr, BM: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Merge the parts of ROWS matrix rows of one tile."""
    q0 = tl.load(entry)
    rows = tl.load(entry + 1)
    begin = tl.load(entry + 2)
    parts = tl.load(entry + 3)
    first = tl.load(entry + 4)
    row = i // G
    at = tl.where(row < first, q0 + row, tl.load(entry + 5) + row - first).to(tl.int64)
    head = kv_head * G + i % G
    valid = row < rows
    d = tl.arange(0, D_TILE)
    stored = valid[:, None] & (d < D)[None, :]
    total = tl.zeros([ROWS, D_TILE], tl.float32)
    norm = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], LOWEST, tl.float32)
    for number in range(0, parts):
        place = ((begin + number) * KV_HEADS + kv_head).to(tl.int64) * BM + i
        lse = tl.load(partial_lse + place, mask=valid, other=float("-inf"))
        new_peak = tl.maximum(peak, lse)
        weight = tl.exp2(lse - new_peak)
        fade = tl.exp2(peak - new_peak)
        norm = norm * fade + weight
        result = tl.load(partial + (place * D)[:, None] + d[None, :], mask=stored, other=0.0)
        total = total * fade[:, None] + result * weight[:, None]
        peak = new_peak
    result = total / tl.where(norm > 0, norm, 1.0)[:, None]
    address = out + (at * out_row + head * out_head)[:, None] + d[None, :]
    tl.store(address, result.to(out.dtype.element_ty), mask=stored)
