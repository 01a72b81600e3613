"""A further kind of rows after the windows is one class: all others hold, see and predict what they did before."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings

from lopa_dist.decode import DecodeConfig, HostState, State
from lopa_dist.ragged import UNBOUNDED
from lopa_dist.rows import ForwardBatch
from lopa_dist.rows.draft_rows import VerifiedDrafts
from lopa_dist.rows.lookahead import Lookahead
from lopa_dist.rows.share import Share
from lopa_dist.rows.structure import ExtraRows, Kind
from lopa_dist.rows.window_rows import WindowRows
from tests.rows.test_draft_rows import MASK, drafted


class NextMask(Kind):
    """One row after each window: the mask after its last block, which sees the window and itself."""

    def rows(self, config: DecodeConfig, host: HostState) -> ExtraRows:
        count = (host.branches > 0).astype(int)
        one = np.ones(count.sum(), int)
        return ExtraRows(count, count, own=one, depth=0 * one, until=one, position=host.end[host.branches > 0])


DRAFTS, BOTH = WindowRows((VerifiedDrafts(),)), WindowRows((NextMask(), VerifiedDrafts()))


def laid_out(rows: WindowRows, state: State, host: HostState, ranks: int) -> list[ForwardBatch]:
    """Each rank's rows."""
    return [rows.layout(state, host, Share(rank, ranks), None, Lookahead(0), {}) for rank in range(ranks)]


def rows_of(batch: ForwardBatch, g: int, skip: int | None) -> list[tuple[int, int, int, list[int]]]:
    """Each row of a segment without the one at `skip`: token, position, depth, and which of the others it sees."""
    start, rows = int(batch.table.start[g]), int(batch.table.rows[g])
    until = np.full(rows, UNBOUNDED) if batch.drafts is None else batch.drafts.until.numpy()[start : start + rows]
    others = [number for number in range(rows) if number != skip]
    found = []
    for number in others:
        row = start + number
        sees = (np.arange(rows) < batch.table.hi[row]) & (batch.table.depth[row] < until)
        assert skip is None or not sees[skip]
        seen = np.flatnonzero(sees[others]).tolist()
        found.append((int(batch.tokens[row]), int(batch.positions[row]), int(batch.table.depth[row]), seen))
    return found


@settings(max_examples=60, deadline=None)
@given(case=drafted(["d2f", "d2f_causal"]))
def test_a_row_after_every_window(case: tuple[State, int]) -> None:
    state, ranks = case
    if state.complete[0] == 0:
        state.committed[0] = -1  # its prompt runs in the same forward
    host = state.to_host()
    before, after = laid_out(DRAFTS, state, host, ranks), laid_out(BOTH, state, host, ranks)
    assert (after[0].computed - before[0].computed == host.branches).all()
    assert BOTH.of_branch(state.config, 10) == DRAFTS.of_branch(state.config, 10) + 1
    running = np.flatnonzero(host.branches > 0)
    wanted = len(before[0].heads.predictions.where)
    for rank, (one, two) in enumerate(zip(before, after, strict=True)):
        assert two.heads.columns == one.heads.columns + len(running)
        extra = two.must_be_finite()  # whose K/V must be finite, because the window's rows do not see them
        slots = dict(zip(two.heads.predictions.rows.tolist(), two.heads.slots.tolist(), strict=True))
        for g in range(len(one.table.rows)):
            slot, branch = int(one.table.sequence[g]), int(one.table.branch[g])
            if branch < 0:
                assert rows_of(one, g, None) == rows_of(two, g, None)
                continue
            width = int(host.end[slot] - one.table.first[g])
            assert rows_of(one, g, None) == rows_of(two, g, width)
            row = int(two.table.start[g]) + width
            assert int(two.tokens[row]) == MASK
            assert int(two.positions[row]) == host.prompt[slot] + host.end[slot]
            assert two.table.hi[row] == width + 1
            assert extra is not None
            assert extra[row]
            assert not extra[two.table.start[g] : row].any()
            column = wanted + running.tolist().index(slot)
            mine = branch % ranks == rank  # otherwise its rows run here for the K/V alone
            assert slots.get(row) == (branch // ranks * two.heads.columns + column if mine else None)

    shape = (ranks, after[0].heads.branches, after[0].heads.columns, state.config.record_size)
    gathered = torch.arange(int(np.prod(shape)), dtype=torch.int32).view(shape)
    without = torch.cat([gathered[:, :, :wanted], gathered[:, :, wanted + len(running) :]], 2)
    found, expected = BOTH.unpack(state, after[0], gathered), DRAFTS.unpack(state, before[0], without)
    assert torch.equal(found.packed, expected.packed)
    assert found.drafts is not None
    assert expected.drafts is not None
    assert torch.equal(found.drafts.packed, expected.drafts.packed)
