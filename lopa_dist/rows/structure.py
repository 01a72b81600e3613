"""Which rows a forward has, and what they predict: its ragged structure, computed on the host in numpy.

All of it follows from a few integers of every sequence. Positions are counted from the block in which a sequence's
window begins, so later steps, other blocks and other requests often have the same structure, which `WindowRows` caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lopa_dist.decode.config import DecodeConfig
from lopa_dist.decode.state import HostState, Records, State, wanted_count
from lopa_dist.ragged import UNBOUNDED, Ints, begins, padded, ragged_arange, ranges
from lopa_dist.rows.forward_batch import DraftRows, ForwardBatch
from lopa_dist.rows.prefill import Prefill, SharedPrefixes, last_rows, note_hidden_states, note_rows, prefill_segments
from lopa_dist.rows.share import Share


@dataclass
class ExtraRows:
    """Rows of one kind. In every branch they follow the window's rows, in the order of `WindowRows.kinds`.

    A row sees the cached tokens, the rows of its segment that stand before its kind, and the first `own` rows of its
    kind. Of the segment's rows, it sees only those whose `until` is above its `depth`. The window's rows do not see
    rows after the window, whose K/V are never kept.

    All branches of a sequence have the same rows, so they have equal shapes, on whichever rank they run. [n] is a row
    of one branch of each sequence: first `count[0]` rows of sequence 0, then `count[1]` rows of sequence 1, and so on.
    """

    count: Ints  # [S] rows in each branch of a sequence; 0 where none runs (`HostState.branches` is 0)
    reported: Ints  # [S] how many of these report what they predict: the last ones
    own: Ints  # [n] rows of its kind that a row sees, from the first on; to see itself, at least its number + 1
    depth: Ints  # [n] drafts that a row takes as filled; 0 for all rows but those of drafts
    until: Ints  # [n] the depth from which on rows do not see this row
    position: Ints  # [n] a row's position, and that of the token in the canvas that it holds


class Kind:
    """A kind of rows that follow windows. A subclass says at least how many there are and what they see (`rows`).

    Structures are cached, so `rows` and `find` may read only what `window_rows.shapes` yields for each sequence. Rows
    that hold other tokens than the canvas does are filled in on the device, by `place`. Records of a kind are dropped
    unless `unpack` reads them.
    """

    def rows(self, config: DecodeConfig, host: HostState) -> ExtraRows:
        """Return these rows of every sequence.

        A sequence with all branches and drafts must have the most (`WindowRows.of_branch`).
        """
        raise NotImplementedError

    def find(self, state: State, host: HostState, structure: Structure) -> None:
        """Add to the structure of all rows what the device needs for these (`Structure.indices`)."""

    def offsets(
        self, structure: Structure, host: HostState, block_begin: Ints, row_minus_position: Ints
    ) -> dict[str, Ints]:
        """Return what `place` needs that depends on where the windows are.

        Args:
            structure: of the forward.
            host: of this step.
            block_begin: ``[S]`` from `block_begins`.
            row_minus_position: ``[G]`` of the rows of each segment's window.
        """
        return {}

    def place(
        self, state: State, structure: Structure, index: dict[str, Tensor], tokens: Tensor, positions: Tensor
    ) -> DraftRows | None:
        """Fill in these rows.

        Args:
            state, structure: of the forward.
            index: of `Structure.indices` and `offsets`, on the device.
            tokens, positions: ``[R']`` of all rows; changed in place.
        """
        return None

    def unpack(self, state: State, batch: ForwardBatch, records: Records, parts: Tensor) -> Records:
        """Return the records of a step with what these rows predict.

        Args:
            state, batch: of this step.
            records: ``[S, K, W]`` of the windows.
            parts: ``[n, K, columns]`` all records, the windows' first.
        """
        return records


@dataclass
class DraftOrigins:
    """What the rows of drafts belong to. `VerifiedDrafts.offsets` adds where the windows are in a step."""

    segment: Ints  # [D] of each token row, and of the verification row that belongs to it
    sequence: Ints  # [2 D] of token rows, then of verification rows
    shift: Ints  # [2 D] a draft's position minus that of its row
    predicts_from: Ints  # [S] as in `DraftRows`, from `block_begins`


@dataclass
class Structure:
    """The rows of one forward on one rank.

    [S] a sequence, [G] a segment, [R] a packed row, [P] with padding and one more row for unused edits,
    [h] a prediction of a window, [H] any prediction.
    """

    sequence: Ints  # [G] as in `ForwardBatch` and its parts, like the fields up to `prefill`
    branch: Ints  # [G]
    start: Ints  # [G]
    rows: Ints  # [G]
    hi: Ints  # [R]
    depth: Ints  # [R]
    head_sequence: Ints  # [H]
    columns: int
    width: int
    computed: Ints  # [S]
    prefill: Prefill | None
    until: Ints  # [R] the depth from which on rows do not see this row
    wanted: int  # positions of all sequences that are predicted: masked ones, with `tau_edit` filled ones, too
    of_commit: NDArray[np.bool_]  # [S] see `record_of_commit`
    # positions, counted from the sequence's `block_begins`
    first: Ints  # [G] position of a segment's first row
    begin: Ints  # [S] position of the first row of a sequence's windows
    stop: Ints  # [S] position after their last row
    row_sequence: Ints  # [P]
    row_position: Ints  # [P]
    # what the device needs, by name:
    #   edit_cell [G]: of a segment's branch in `State.edits`
    #   number [h]: which of all wanted positions is predicted
    #   row_minus_cell [h]: see `rows_minus_cells`
    #   extra_rows [H - h]: the predicting rows after windows
    #   head_slot [H]: as `Heads.slots`
    # and, where drafts have rows, those of `VerifiedDrafts.find`
    indices: dict[str, Ints]
    on_device: dict[str, Tensor] = field(default_factory=dict)  # the same, on the device
    drafts: DraftOrigins | None = None  # None: no draft has rows of its own

    @property
    def has_edits(self) -> bool:
        """Whether there is a segment of a branch beside the anchor, which may differ from it."""
        return bool(self.branch.max(initial=0) > 0)


def block_begins(config: DecodeConfig, host: HostState) -> Ints:
    """Return the beginning of the block in which each sequence's window begins, ``[S]``."""
    return host.complete - host.complete % config.block_size


def make_structure(
    state: State,
    host: HostState,
    share: Share,
    prefixes: SharedPrefixes | None,
    extra: Sequence[ExtraRows],
) -> Structure:
    """Return the structure of a forward.

    Args:
        state, host, share, prefixes: as in `layout`.
        extra: the rows after windows, by kind, in order.
    """
    config, block_begin = state.config, block_begins(state.config, host)

    # segments
    sequence, branch, reports = window_segments(state, host, share)
    begin, stop = row_span(state, host)
    first, span = begin[sequence], (stop - begin)[sequence]
    prefill = prefill_segments(config, host, prefixes)
    if prefill:
        sequence = np.append(prefill.sequence, sequence)
        branch = np.append(np.full_like(prefill.sequence, -1), branch)
        reports = np.append(np.zeros_like(prefill.sequence, bool), reports)
        first, span = np.append(prefill.first, first), np.append(prefill.stop - prefill.first, span)
    rows = span + sum(kind.count[sequence] for kind in extra) * (branch >= 0)
    start = begins(rows)
    if prefill:
        note_rows(prefill, start, prefixes)
        if prefixes and state.vocabulary.shift:
            note_hidden_states(prefill, host, prefixes)

    # a segment's rows in the order of positions; those after windows are set in `add_extra_rows`
    total = int(rows.sum())
    position = ranges(first, rows)
    row_sequence, row_position = np.zeros((2, padded(max(total, 1)) + 1), np.int64)
    row_sequence[:total] = sequence.repeat(rows)
    row_position[:total] = position - block_begin[sequence].repeat(rows)

    # predicted positions, one record per branch each
    wanted = wanted_count(config, host) * (host.branches > 0)  # [S]
    longest = int(((host.end - host.complete) * (host.branches > 0)).max(initial=1))
    structure = Structure(
        sequence=sequence, branch=branch, start=start, rows=rows, hi=own_columns(config, position, first, span, rows),
        depth=np.zeros(total, np.int64), until=np.full(total, UNBOUNDED), head_sequence=sequence[:0],
        columns=int(wanted.sum() + sum(kind.reported.sum() for kind in extra)),
        width=-(-longest // config.block_size) * config.block_size,
        computed=(stop - begin + sum(kind.count for kind in extra)) * host.branches,
        prefill=prefill, wanted=int(wanted.sum()), of_commit=record_of_commit(state, host),
        first=first - block_begin[sequence], begin=begin - block_begin, stop=stop - block_begin,
        row_sequence=row_sequence, row_position=row_position,
        indices={"edit_cell": sequence * config.max_branches + np.maximum(branch, 0)},
    )  # fmt: skip
    predict_windows(state, host, structure, prefixes, wanted, reports, share)
    add_extra_rows(structure, extra, span, reports, block_begin, share)
    return structure


def predict_windows(
    state: State,
    host: HostState,
    structure: Structure,
    prefixes: SharedPrefixes | None,
    wanted: Ints,
    reports: NDArray[np.bool_],
    share: Share,
) -> None:
    """Set which rows predict the wanted positions of the windows, and where each prediction goes.

    Wanted positions are numbered through all sequences, and the number is the column of a branch's predictions. Each
    segment that reports predicts those of its sequence. For example, if two sequences have three and two of them, each
    branch of the second one predicts those with the numbers 3 and 4.

    Args:
        state, host, prefixes, share: as in `layout`.
        structure: of the rows; changed in place.
        wanted: ``[S]`` predicted positions of each branch of a sequence.
        reports: ``[G]`` whether this rank reports a segment's predictions.
    """
    sequence = structure.sequence
    reported = wanted[sequence] * reports  # [G] predictions
    number = ranges(begins(wanted)[sequence], reported)  # [h]
    structure.head_sequence = sequence.repeat(reported)
    structure.indices |= {
        "number": number,
        "row_minus_cell": rows_minus_cells(state, host, structure, prefixes, reported),
        "extra_rows": number[:0],
        "head_slot": number + (share.slot(structure.branch) * structure.columns).repeat(reported),
    }


def rows_minus_cells(
    state: State, host: HostState, structure: Structure, prefixes: SharedPrefixes | None, reported: Ints
) -> Ints:
    """Return the number of a position's predicting row minus the number of its cell in ``[S, W]``, ``[h]``.

    The host knows how many positions of a window are masked, but not which, so the device finds their cells
    (`window_rows.predict`). This difference is the same everywhere in a segment. For example, the windows of sequence 2
    have the cells from 64 on if the width is 32. If one of them has the rows from 100 on, the difference is 36. With
    the logit shift it is 35, because the row before the position predicts it.

    Args:
        state, host, structure, prefixes: as in `predict_windows`.
        reported: ``[G]`` predictions of each segment.
    """
    sequence, prefill = structure.sequence, structure.prefill
    complete = host.complete % state.config.block_size  # [S] position of the first cell, from `block_begins`
    first_cell = sequence * structure.width  # [G]
    # [G] the row that predicts that position: its own, with the shift the one before
    first_row = complete[sequence] - int(state.vocabulary.shift) + structure.start - structure.first
    result = (first_row - first_cell).repeat(reported)
    if state.vocabulary.shift:
        # The row before the window may be elsewhere. In a prefill it is the prompt's last row. If it is not in this
        # forward, any row will do: `unpack` puts the stored record in its place.
        first_row = np.maximum(first_row, structure.start)
        if prefill:
            after_prompt = prefill.waiting[sequence] & (host.prompt[sequence] > 0)
            first_row = np.where(after_prompt, last_rows(prefill, host, prefixes)[sequence], first_row)
        changed = np.flatnonzero(reported * host.starts_masked[sequence])
        result[begins(reported)[changed]] = (first_row - first_cell)[changed]
    return result


def add_extra_rows(
    structure: Structure,
    extra: Sequence[ExtraRows],
    span: Ints,
    reports: NDArray[np.bool_],
    block_begin: Ints,
    share: Share,
) -> None:
    """Set what the rows after windows see, and where their predictions go.

    Args:
        structure: of the windows' rows, with room for these rows; changed in place.
        extra: as in `make_structure`.
        span: ``[G]`` rows of each segment without these.
        reports: ``[G]`` as in `predict_windows`.
        block_begin: ``[S]`` from `block_begins`.
        share: of this rank.
    """
    sequence, branch, indices = structure.sequence, structure.branch, structure.indices
    column = structure.wanted  # of the kind's first prediction
    for kind in extra:
        rows = kind.count[sequence] * (branch >= 0)  # [G]
        row = ranges(structure.start + span, rows)
        number = ranges(begins(kind.count)[sequence], rows)  # among the [n] of `kind`
        structure.hi[row] = span.repeat(rows) + kind.own[number]
        structure.depth[row], structure.until[row] = kind.depth[number], kind.until[number]
        structure.row_position[row] = kind.position[number] - block_begin[sequence].repeat(rows)
        span = span + rows

        # the last rows of each segment report, to the columns of their sequence
        reported = kind.reported[sequence] * reports  # [G]
        slot = share.slot(branch) * structure.columns + column + begins(kind.reported)[sequence]
        structure.head_sequence = np.append(structure.head_sequence, sequence.repeat(reported))
        indices["extra_rows"] = np.append(indices["extra_rows"], ranges(structure.start + span - reported, reported))
        indices["head_slot"] = np.append(indices["head_slot"], ranges(slot, reported))
        column += int(kind.reported.sum())


def window_segments(state: State, host: HostState, share: Share) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """Return the sequences and branches of this rank's windows, and for which of them it reports predictions.

    Every rank computes the rows that must be cached and are the same in every branch. To this end, a rank that has none
    of a sequence's branches runs the anchor, whose predictions another rank reports.
    """
    config = state.config
    count = owned = share.owned(host.branches)
    if share.ranks > 1 and config.scope.caches_kv:
        prefill = (host.committed < 0) & (not config.scope.prefills_apart)
        commits = (host.complete > host.committed) & config.scope.by_blocks
        count = np.maximum(count, (prefill | commits) & (host.branches > 0))
    sequence = np.repeat(np.arange(state.slots), count)
    mine = owned[sequence] > 0
    return sequence, np.where(mine, share.mine(ragged_arange(count)), 0), mine


def row_span(state: State, host: HostState) -> tuple[Ints, Ints]:
    """Return the range ``[begin, stop)`` of positions that go through the model in a window's segment, ``[S]`` each.

    With `kv_is_final` the range begins at the first uncommitted token or at the boundary row before it, and ends with
    the last appended block and the suffix. In the first step it includes the prompt, unless that is prefilled apart.
    Without `kv_is_final` it is the whole sequence. With a dual cache, that is so only in the first step and after a
    block was completed; in other steps, the range is that of the appended blocks after the committed tokens.
    """
    scope = state.config.scope
    if scope.kv_is_final:
        begin = np.maximum(host.committed, 0) - fresh_boundary(state, host)
        if not scope.prefills_apart:
            begin = np.where(host.committed < 0, -host.prompt, begin)
        return begin, host.end + host.suffix
    begin, stop = -host.prompt, host.limit + host.suffix
    if not scope.caches_kv:
        return begin, stop
    anew = host.committed < host.complete
    return np.where(anew, begin, host.committed), np.where(anew, stop, host.end)


def fresh_boundary(state: State, host: HostState) -> NDArray[np.bool_]:
    """Return whether the last committed row is part of the window, because it predicts the first position, ``[S]``.

    The row is recomputed while that position is masked. Only a row that sees the window can have changed since its
    commit: with block-causal windows, and at the end of a prompt that sees only itself, the record from the commit
    still holds.
    """
    scope = state.config.scope
    if not (scope.boundary == "fresh" and scope.window_attention == "full" and state.vocabulary.shift):
        return np.zeros(state.slots, bool)
    return (host.committed > 0) & (host.committed == host.complete) & (host.starts_masked > 0)


def record_of_commit(state: State, host: HostState) -> NDArray[np.bool_]:
    """Return whether the window's first position is masked and its record is that of the commit, ``[S]``.

    It is stored in `State.boundary`.
    """
    scope = state.config.scope
    if not scope.caches_kv or scope.boundary == "fill" or not state.vocabulary.shift:
        return np.zeros(state.slots, bool)
    waiting = (host.committed >= 0) & (host.committed == host.complete) & (host.starts_masked > 0)
    return waiting & ~fresh_boundary(state, host)


def own_columns(config: DecodeConfig, position: Ints, first: Ints, span: Ints, rows: Ints) -> Ints:
    """Return how many of its segment's first rows each row sees, ``[R]``, without those after windows.

    Args:
        config: of the step.
        position: ``[R]``.
        first: ``[G]`` position of each segment's first row.
        span, rows: ``[G]`` rows of each segment, without and with those after its window.
    """
    return np.minimum(config.scope.sees(position, config.block_size) - first.repeat(rows), span.repeat(rows))
