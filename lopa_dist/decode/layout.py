"""Which rows of which sequence x branch go through the model, on this rank.

The host knows a few integers per sequence (`Lengths`), so the ragged structure is worked out in numpy; what depends on
token values (ids, masked positions, edits) stays on the device and is indexed there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lopa_dist.decode.sending import send
from lopa_dist.decode.state import Lengths, Records, State

Ints = NDArray[np.int64]
ROW_TILE = 16  # rows are padded to a multiple of this: matrix kernels then give a row the same bits in any batch


@dataclass
class Batch:
    """One forward's packed rows on one rank: segments (sequence x branch) of consecutive window positions.

    A segment's rows see the cached tokens [0, shared) of their sequence, the columns [0, hi) of their own segment and,
    with a dual cache, the tokens behind their segment whose K/V an earlier forward left.
    """

    sequence: Ints  # [G] slot of each segment
    branch: Ints  # [G]
    start: Ints  # [G] its first row in the packed batch
    rows: Ints  # [G] its number of rows
    shared: Ints  # [G] cached tokens it sees
    first: Ints  # [G] position of its first row, relative to the prompt's end
    hi: Ints  # [R] own columns a row sees
    tail: tuple[Ints, Ints] | None  # [G] cached tokens seen behind the segment, with a dual cache: first and number
    begin: Ints  # [S] position of the first row of each sequence's segments
    stop: Ints  # [S] position behind their last row
    tokens: Tensor  # [R'] ids, R' = R rounded up to ROW_TILE
    positions: Tensor  # [R'] absolute
    head_rows: Tensor  # [H] rows whose prediction is wanted
    head_slots: Tensor  # [H] where in the record buffer it goes
    head_sequence: Ints  # [H] slot whose position it is
    head_keys: Tensor | None  # [H] keys of their random numbers, where any are drawn
    local_branches: int  # records are a [local_branches, masked] buffer
    masked: int  # masked positions of all sequences (of their anchors)
    where: Tensor  # [masked, 2] (sequence, offset in `State.window`) of each
    width: int  # W, of the dense records


def layout(state: State, lengths: Lengths, rank: int = 0, ranks: int = 1) -> Batch:
    """Lay out this rank's share of the next forward: branch j runs on rank j mod `ranks`.

    A prompt is prefilled by every rank, so that its K/V need not travel; with block-causal windows the same holds for
    finished blocks, whose K/V is the same in every branch (spec section 4).

    Args:
        state, lengths: the state and its host copy, of the same step.
        rank, ranks: of the branch group.
    """
    config, device = state.config, state.canvas.device
    prefill = (lengths.committed < 0) & (lengths.branches > 0)
    commits = (lengths.finished > lengths.committed) & (lengths.branches > 0)
    everywhere = prefill | (commits & (config.window_attention == "block_causal"))
    everywhere &= config.cache != "none"
    owned = (lengths.branches - rank + ranks - 1) // ranks  # branches rank, rank + ranks, ...
    count = np.where(everywhere & (owned <= 0), 1, owned.clip(0))

    # segments
    sequence = np.repeat(np.arange(state.slots), count)
    nth = within(count)
    mine = owned[sequence] > 0  # else a prefill of the anchor that another rank reports
    branch = np.where(mine, rank + ranks * nth, 0)
    prompt = lengths.prompt[sequence]
    begin, stop = row_span(state, lengths)
    first, behind = begin[sequence], stop[sequence]
    rows = behind - first
    start = np.cumsum(rows) - rows
    shared = prompt + first  # nothing where the first row is the prompt's first
    tail = (prompt + behind, lengths.limit[sequence] - behind) if config.cache == "dual" else None
    segments = np.arange(len(rows))

    # rows: what a segment adds to the packed row number r gives its position, its column and its absolute position
    total = int(rows.sum())
    padded = -(-max(total, 1) // ROW_TILE) * ROW_TILE
    column = sequence * state.canvas.shape[1] + state.origin
    owner = np.repeat(segments, rows)
    position = np.arange(total) + (first - start)[owner]
    cell = position + column[owner]
    absolute = position + prompt[owner]
    hi = visible_end(state, position, behind[owner]) - first[owner]

    # masked positions, one record per branch each
    masked = lengths.masked * (lengths.branches > 0)
    width = -(-int((lengths.end - lengths.finished).max(initial=1)) // config.block_size) * config.block_size
    amount = int(masked.sum())
    where = torch.nonzero_static(state.window(width).masked, size=amount)  # [masked, 2], no synchronisation
    before = np.cumsum(masked) - masked
    wanted = masked[sequence] * mine
    head = np.repeat(segments, wanted)
    head_sequence = sequence[head]
    entry = within(wanted) + before[head_sequence]
    shift = int(state.vocabulary.shift)
    base = (lengths.finished[sequence] + start - first - shift)[head]
    slot = entry + (branch // ranks * amount)[head]

    # on the device, in one transfer
    parts = (cell, absolute, sequence, branch, start - first, entry, base, start[head], slot, head_sequence)
    sent = send(np.concatenate(parts), device)
    cells, absolutes, sequences, branches, offsets, entries, bases, starts, slots, owners = sent.split(
        [len(part) for part in parts]
    )
    tokens = torch.full((padded + 1,), state.vocabulary.eos_ids[0], device=device)  # one more, for edits of nothing
    tokens[:total] = state.canvas.view(-1)[cells]
    if len(rows):
        at, token = state.edits[:, sequences, branches]  # [G, E]
        tokens[torch.where(at >= 0, at + offsets[:, None], padded).view(-1)] = token.view(-1)
    positions = torch.zeros(padded, dtype=torch.long, device=device)
    positions[:total] = absolutes
    place = where[:, 1][entries]
    # without a fresh boundary row the first masked position has no row of its own; its kept record replaces this one
    head_rows = torch.maximum(bases + place, starts)
    random = bool(state.sampled[head_sequence].any())
    keys = row_keys(state, owners, place) if random else None
    return Batch(
        sequence, branch, start, rows, shared, first, hi, tail, begin, stop, tokens[:padded], positions, head_rows,
        slots, head_sequence, keys, -(-config.max_branches // ranks), amount, where, width,
    )  # fmt: skip


def row_span(state: State, lengths: Lengths) -> tuple[Ints, Ints]:
    """Which positions go through the model: those of ``[begin, stop)``, ``[S]`` each.

    A window begins at its prompt, at the first uncommitted token, or at the boundary row before that. It ends with the
    last appended block or, where the canvas is whole, with its last mask, unless a dual cache has the masks behind.
    """
    config = state.config
    if config.cache == "none":
        begin = -lengths.prompt
    else:
        anew = lengths.committed < 0
        if config.cache != "block":  # prefix and dual: whenever a block was finished, everything before it
            anew = lengths.committed < lengths.finished
        begin = np.where(anew, -lengths.prompt, lengths.committed - fresh_boundary(state, lengths))
    if config.canvas == "growing":
        return begin, lengths.end
    return begin, np.where(anew, lengths.limit, lengths.end) if config.cache == "dual" else lengths.limit


def fresh_boundary(state: State, lengths: Lengths) -> NDArray[np.bool_]:
    """Where the last committed row is recomputed because the first masked position is predicted by it.

    Only a row that sees the window can have changed since its commit: with block-causal windows, and at the end of a
    prompt that sees only itself, the record kept from the commit is the same, and no row is spent.
    """
    config = state.config
    if config.boundary != "fresh" or config.window_attention != "full" or not state.vocabulary.shift:
        return np.zeros(state.slots, bool)
    sees_window = (lengths.committed > 0) | (config.prompt_attention == "joint")
    return sees_window & (lengths.committed == lengths.finished) & (lengths.first_masked > 0)


def kept_boundary(state: State, lengths: Lengths) -> NDArray[np.bool_]:
    """Where the first masked position takes the record kept from the commit."""
    config = state.config
    if config.cache == "none" or config.boundary == "fill" or not state.vocabulary.shift:
        return np.zeros(state.slots, bool)
    waiting = (lengths.committed >= 0) & (lengths.committed == lengths.finished) & (lengths.first_masked > 0)
    return waiting & ~fresh_boundary(state, lengths)


def visible_end(state: State, position: Ints, end: Ints) -> Ints:
    """The position behind the last one that each row sees (spec section 4), ``[R]``; `end` is its segment's."""
    config = state.config
    if config.window_attention == "block_causal":
        end = np.minimum((position // config.block_size + 1) * config.block_size, end)
    if config.prompt_attention == "self":
        end[position < 0] = 0
    elif config.prompt_attention == "blocks" and config.window_attention == "full":
        prompt = position < 0
        end[prompt] = (position[prompt] // config.block_size + 1) * config.block_size
    return end


def row_keys(state: State, sequence: Tensor, place: Tensor) -> Tensor:
    """Random keys by (seed, request, position, step): no rank, batch or order in them."""
    position = state.finished[sequence] + place
    return (state.key[sequence] * 0x1_0000_0001 + position) * 0x1_0000_0001 + state.step[sequence]


def unpack(state: State, lengths: Lengths, batch: Batch, gathered: Tensor) -> Records:
    """Spread gathered records over ``[S, K, W]`` of `State.window`.

    Args:
        state, lengths, batch: of this step.
        gathered: ``[ranks, local_branches, masked, 3]`` int32: token, and the bits of probability and confidence.
    """
    branches = state.config.max_branches
    parts = gathered.permute(3, 1, 0, 2).flatten(1, 2)[:, :branches]  # branch j lies at rank j mod ranks, j div ranks
    sequence, place = batch.where.unbind(1)
    dense = gathered.new_zeros(3, branches, state.slots * batch.width)
    dense.index_copy_(2, torch.add(place, sequence, alpha=batch.width), parts)
    packed = dense.view(3, branches, state.slots, batch.width).transpose(1, 2)
    kept = kept_boundary(state, lengths)
    if kept.any():
        first = packed[..., 0]
        torch.where(send(kept, gathered.device)[:, None], state.boundary.packed[..., None], first, out=first)
    return Records(packed)


def within(counts: Ints) -> Ints:
    """``[0..counts[0]), [0..counts[1]), ...`` in one array."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
