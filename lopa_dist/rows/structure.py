"""Which rows a forward has, and what they predict: its ragged structure, computed on the host in numpy.

All of it follows from a few integers of every sequence. Positions are counted from each sequence's `origins`, so later
steps, other blocks and other requests have the same structure, and `layout` caches it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lopa_dist.decode.config import DecodeConfig
from lopa_dist.decode.state import HostState, State, wanted_count
from lopa_dist.ragged import Ints, padded, ragged_arange
from lopa_dist.rows.prefill import Prefill, SharedPrefixes, last_rows, note_rows, prefill_apart, prefill_segments


@dataclass
class Structure:
    """The rows of one forward on one rank.

    [S] a sequence, [G] a segment, [R] a packed row, [R'] with padding and one more row for unused edits,
    [H] a prediction, [D] a draft with rows of its own (`draft_rows`).
    """

    sequence: Ints  # [G] as in `ForwardBatch`, like the fields up to `prefill`
    branch: Ints  # [G]
    start: Ints  # [G]
    rows: Ints  # [G]
    hi: Ints  # [R]
    depth: Ints  # [R]
    head_sequence: Ints  # [H]
    columns: int
    width: int
    prefill: Prefill | None
    reported: NDArray[np.bool_]  # [G] whether this rank reports its predictions
    wanted: int  # positions of all sequences that are predicted: masked ones, with `tau_edit` filled ones, too
    of_commit: NDArray[np.bool_]  # [S] see `record_of_commit`
    # positions and cells, counted from the sequence's origin
    first: Ints  # [G] position of a segment's first row
    behind: Ints  # [G] position behind its last row, without rows of drafts
    begin: Ints  # [S] position of the first row of a sequence's windows
    stop: Ints  # [S] position behind their last row
    row_sequence: Ints  # [R']
    row_position: Ints  # [R'] any value for rows of drafts, which the device fills in
    row_cell: Ints  # [R'] its cell in `State.canvas`
    # indices for the device:
    #   edits: each segment's cell in `State.edits`
    #   entry: which of all predicted positions each prediction of a window is for
    #   base: predicting row = base + the predicted position's cell in the dense records [S, width]
    #   slot: of all predictions, as `ForwardBatch.head_slots`
    arrays: dict[str, Ints]  # on the host
    on: dict[str, Tensor] = field(default_factory=dict)
    draft_begin: Ints | None = None  # [S] as `DraftRows.begin`, from the origin; None: no draft has rows of its own


def origins(config: DecodeConfig, host: HostState) -> Ints:
    """Return the beginning of the block in which each sequence's window begins, ``[S]``."""
    return host.complete - host.complete % config.block_size


def window_structure(
    state: State,
    host: HostState,
    rank: int,
    ranks: int,
    prefixes: SharedPrefixes | None,
    origin: Ints,
    extra: Ints,
) -> Structure:
    """Return the structure of a forward, in which rows of drafts are left to `draft_rows.add_draft_rows`.

    Args:
        state, host, rank, ranks, prefixes: as of `layout`.
        origin: ``[S]`` from `origins`.
        extra: ``[S]`` drafts of each branch of a sequence that have rows of their own, from `drafts_with_rows`.
    """
    config = state.config

    # segments
    sequence, branch, mine = window_segments(state, host, rank, ranks)
    begin, stop = row_span(state, host, prefixes)
    first, behind = begin[sequence], stop[sequence]
    prefill = prefill_segments(config, host, prefixes)
    if prefill:
        none = np.zeros_like(prefill.sequence)
        sequence, branch = np.append(prefill.sequence, sequence), np.append(none - 1, branch)
        first, behind = np.append(prefill.first, first), np.append(prefill.behind, behind)
        mine = np.append(none > 0, mine)
    span = behind - first
    rows = span + 2 * extra[sequence] * (branch >= 0)
    start = rows.cumsum() - rows

    # a segment's rows in the order of positions; then its drafts' rows, which repeat the last one until filled in
    total = int(rows.sum())
    position = first.repeat(rows) + np.minimum(ragged_arange(rows), span.repeat(rows) - 1)
    row_sequence, row_position, row_cell = np.zeros((3, padded(max(total, 1)) + 1), np.int64)
    row_sequence[:total] = sequence.repeat(rows)
    row_position[:total] = position - origin[sequence].repeat(rows)
    cells = sequence * state.canvas.shape[1] + state.origin
    row_cell[:total] = row_position[:total] + cells.repeat(rows)

    # predicted positions, one record per branch each; a head row's record goes to its `slot`
    positions = wanted_count(config, host) * (host.branches > 0)
    longest = int(((host.end - host.complete) * (host.branches > 0)).max(initial=1))
    width = -(-longest // config.block_size) * config.block_size
    amount = int(positions.sum())
    wanted = positions[sequence] * mine
    heads = wanted.cumsum() - wanted  # each segment's first
    entry = np.arange(wanted.sum()) + (positions.cumsum() - positions)[sequence].repeat(wanted) - heads.repeat(wanted)
    columns = amount + int(extra.sum())
    slot = entry + (branch // ranks * columns).repeat(wanted)

    # the row that predicts a position: its own or, with the shift, the one before
    shift = int(state.vocabulary.shift)
    base = host.complete[sequence] + start - first - shift
    if prefill:
        note_rows(prefill, start, prefixes)
    bases = (base - sequence * width).repeat(wanted)
    if shift:
        ahead = np.flatnonzero(wanted * host.first_masked[sequence])
        # The row before the window predicts its first position. If that row is not in this forward, any row will do:
        # `unpack` puts the stored record in its place. In a prefill it is the prompt's last row.
        boundary = np.maximum(base, start)
        if prefill and prefill_apart(config):
            answers = prefill.waiting[sequence] & (host.prompt[sequence] > 0)
            boundary = np.where(answers, last_rows(prefill, host, prefixes)[sequence], boundary)
        bases[heads[ahead]] = (boundary - sequence * width)[ahead]

    edits = sequence * config.max_branches + np.maximum(branch, 0)
    return Structure(
        sequence=sequence, branch=branch, start=start, rows=rows, hi=own_columns(config, position, first, span, rows),
        depth=np.zeros(total, np.int64), head_sequence=sequence.repeat(wanted), columns=columns, width=width,
        prefill=prefill, reported=mine, wanted=amount, of_commit=record_of_commit(state, host),
        first=first - origin[sequence], behind=behind - origin[sequence],
        begin=begin - origin, stop=stop - origin, row_sequence=row_sequence, row_position=row_position,
        row_cell=row_cell,
        arrays={"edits": edits, "entry": entry, "base": bases, "slot": slot},
    )  # fmt: skip


def window_segments(state: State, host: HostState, rank: int, ranks: int) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """Return the sequences and branches of this rank's windows, and for which of them it reports predictions.

    Every rank computes the rows that must be cached and are the same in every branch. For this, a rank without any of a
    sequence's branches runs the anchor, whose predictions another rank reports.
    """
    config = state.config
    owned = (host.branches - rank + ranks - 1) // ranks  # branches rank, rank + ranks, ...
    count = np.maximum(owned, 0)
    if ranks > 1 and config.stores_kv:
        prefill = (host.committed < 0) & (not prefill_apart(config))
        commits = (host.complete > host.committed) & (config.window_attention == "block_causal")
        count = np.maximum(count, (prefill | commits) & (host.branches > 0))
    sequence = np.repeat(np.arange(state.slots), count)
    mine = owned[sequence] > 0
    return sequence, np.where(mine, rank + ranks * ragged_arange(count), 0), mine


def row_span(state: State, host: HostState, prefixes: SharedPrefixes | None) -> tuple[Ints, Ints]:
    """Return the range ``[begin, stop)`` of positions of each window that go through the model, ``[S]`` each.

    A window begins at the first uncommitted token or at the boundary row before it. If the prompt has no segment of its
    own, it begins at the prompt's first token behind the shared prefix. It ends with the last appended block or, with
    canvas=whole, with the last mask, and then with the suffix, unless a dual cache has what is behind.
    """
    config = state.config
    if not config.stores_kv:
        begin = -host.prompt
    else:
        anew = host.committed < 0
        if not config.keeps_kv:  # dual: whenever a block was completed, everything before it
            anew = host.committed < host.complete
        prompt = 0 if prefill_apart(config) else (prefixes.length if prefixes else 0) - host.prompt
        begin = np.where(anew, prompt, host.committed - fresh_boundary(state, host))
    if config.canvas == "growing":
        return begin, host.end + host.suffix
    whole = host.limit + host.suffix
    return begin, np.where(anew, whole, host.end) if config.stores_kv_behind else whole


def fresh_boundary(state: State, host: HostState) -> NDArray[np.bool_]:
    """Return ``[S]`` whether the last committed row is part of the window, because it predicts the first position.

    It is recomputed while that position is masked. Only a row that sees the window can have changed since its commit:
    with block-causal windows, and at the end of a prompt that sees only itself, the record from the commit still holds.
    """
    config = state.config
    if not (config.boundary == "fresh" and config.window_attention == "full" and state.vocabulary.shift):
        return np.zeros(state.slots, bool)
    sees_window = (host.committed > 0) | (config.prompt_attention == "joint")
    return sees_window & (host.committed == host.complete) & (host.first_masked > 0)


def record_of_commit(state: State, host: HostState) -> NDArray[np.bool_]:
    """Return ``[S]`` whether the first masked position takes the record of the commit of the row before it."""
    config = state.config
    if not config.stores_kv or config.boundary == "fill" or not state.vocabulary.shift:
        return np.zeros(state.slots, bool)
    waiting = (host.committed >= 0) & (host.committed == host.complete) & (host.first_masked > 0)
    return waiting & ~fresh_boundary(state, host)


def own_columns(config: DecodeConfig, position: Ints, first: Ints, span: Ints, rows: Ints) -> Ints:
    """Return how many of its segment's columns each row sees, ``[R]``, without those of drafts.

    Args:
        config: `window_attention` and `prompt_attention` are read.
        position: ``[R]``.
        first, span, rows: ``[G]`` position of each segment's first row, and its number of rows, without and with those
            of drafts.
    """
    every = span.repeat(rows)
    causal = config.window_attention == "block_causal"
    if not causal and first.min(initial=0) >= 0:
        return every
    of_its_block = (position // config.block_size + 1) * config.block_size
    in_window = of_its_block if causal else position + every  # or more: it ends with the segment
    in_prompt = {"self": np.zeros_like(position), "blocks": of_its_block, "joint": in_window}[config.prompt_attention]
    stop = np.where(position < 0, in_prompt, in_window)
    return np.minimum(stop - first.repeat(rows), every)
