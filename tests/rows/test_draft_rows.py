"""Rows of drafts hold what they should and see what the definition says, whatever the drafts' positions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lopa_dist.decode import DecodeConfig, HostState, State, Vocabulary
from lopa_dist.rows import ForwardBatch
from lopa_dist.rows.draft_rows import drafts_with_rows
from lopa_dist.rows.share import Share
from lopa_dist.rules.verified import most_candidates, write_verifying_tokens
from tests.decode.admission import admit
from tests.rules.steps import layout
from tests.strategies import CONTEXTS

MASK, EOS, SIZE = 999, 998, 4


@st.composite
def drafted(draw: st.DrawFn, among: Sequence[str] = CONTEXTS) -> tuple[State, int]:
    """One to three sequences after their prefill, with chains of drafts anywhere that they may be; and the ranks."""
    config = DecodeConfig(
        verify="agreement",
        drafts=draw(st.integers(2, 6)),
        branches=draw(st.integers(0, 2)),
        block_size=SIZE,
        max_new_tokens=16,
        context=draw(st.sampled_from(among)),
    )
    slots = draw(st.integers(1, 3))
    state = State.empty(config, Vocabulary(MASK, (EOS,), draw(st.booleans())), slots, 9, torch.device("cpu"))
    for slot in range(slots):
        prompt = [100 + i for i in range(draw(st.integers(1, 9)))]
        admit(state, slot, prompt, 16, 0)
        known = int(state.known[slot])
        complete = draw(st.sampled_from([0, 0, SIZE, 2 * SIZE]))
        end = min(complete + SIZE * draw(st.integers(1, 3)), int(state.limit[slot]))
        state.answers[slot, known : max(known, complete)] = torch.arange(200 + known, 200 + max(known, complete))
        open_ = list(range(max(complete, known), end))
        masks = sorted(draw(st.sets(st.sampled_from(open_), min_size=1)) | {open_[0]})
        for position in open_:
            state.answers[slot, position] = MASK if position in masks else 200 + position
        state.complete[slot], state.end[slot], state.masked[slot] = complete, end, len(masks)
        state.committed[slot] = complete if draw(st.booleans()) else max(0, complete - SIZE)
        state.starts_masked[slot] = int(masks[0] == complete)
        first_block = [p for p in masks if p < complete + SIZE]
        positions = draw(st.permutations(first_block if config.scope.window_attention == "block_causal" else masks))
        positions = positions[: most_candidates(config)]
        if draw(st.integers(0, 5)) == 0:
            positions = []
        count, m = len(positions), config.drafts
        state.branches[slot] = draw(st.integers(1, config.max_branches)) if positions else 1
        for branch in range(config.max_branches):
            depth = draw(st.integers(1, min(config.max_edits, count))) if branch and positions else 0
            left = max(0, min(m, count - depth))
            state.paths[0, slot, branch], state.paths[3, slot, branch] = depth, left
            if branch < state.branches[slot]:
                state.drafts[slot] = max(int(state.drafts[slot]), depth + left)
            for i, position in enumerate(positions[:depth]):
                token = draw(st.sampled_from([300, 500])) + position
                state.edits[:, slot, branch, i] = torch.tensor([position, token])
            for i in range(m):  # with no drafts, those of earlier steps
                position = positions[(depth + i) % count] if positions else draw(st.integers(0, end - 1))
                state.chain[:2, slot, branch * m + i] = torch.tensor([position, 300 + position])
    if state.vocabulary.shift:
        write_verifying_tokens(state)
    return state, draw(st.sampled_from([1, 2]))


def check_segment(state: State, host: HostState, batch: ForwardBatch, g: int) -> None:
    """One segment of a window: its rows' tokens and positions, and what each row sees."""
    config, shift = state.config, int(state.vocabulary.shift)
    slot, branch = int(batch.table.sequence[g]), int(batch.table.branch[g])
    prompt, begin = int(host.prompt[slot]), int(batch.windows.begin[slot])
    assert batch.drafts is not None
    t = int(drafts_with_rows(config, host)[slot])
    start, rows = int(batch.table.start[g]), int(batch.table.rows[g]) - 2 * t
    begin_chain, left = branch * config.drafts, int(state.paths[3, slot, branch])
    mine = state.chain[:2, slot, begin_chain : begin_chain + left].T.tolist()
    edits = {p: token for p, token in state.edits[:, slot, branch].T.tolist() if p >= 0}

    def token_at(position: int) -> int:
        return int(edits.get(position, int(state.canvas[slot, state.origin + position])))

    def visible_end(position: int) -> int:
        of_its_block = (position // SIZE + 1) * SIZE
        if position < 0 and config.scope.prompt_attention != "joint":
            return 0 if config.scope.prompt_attention == "self" else of_its_block
        return of_its_block if config.scope.window_attention == "block_causal" else begin + rows

    place = {begin + o: start + o for o in range(rows)}
    token_row = {i: start + rows + i - 1 for i in range(1, t + 1)}  # of the i-th draft
    check_row = {i: start + rows + t + i - 2 for i in range(2, t + 2)}

    marked = batch.must_be_finite()
    assert marked is not None or t == 0
    marked_rows = [] if marked is None else start + np.flatnonzero(marked[start : start + rows + 2 * t])
    assert set(marked_rows) == {*token_row.values(), *check_row.values()}

    def check(row: int, token: int, position: int, sees: set[int]) -> None:
        assert int(batch.tokens[row]) == token
        assert int(batch.positions[row]) == prompt + position
        assert batch.drafts is not None
        columns = range(start, start + int(batch.table.hi[row]))
        assert {c for c in columns if batch.table.depth[row] < batch.drafts.until[c]} == sees

    for position, row in place.items():
        seen = {r for p, r in place.items() if p < visible_end(position)}
        check(row, token_at(position), position, seen)
    for i in range(1, min(t, len(mine) - 1) + 1):
        positions = [position for position, _ in mine[:i]]
        seen = {r for p, r in place.items() if p < visible_end(positions[-1]) and p not in positions}
        seen |= {token_row[j] for j in range(1, i + 1)}
        check(token_row[i], mine[i - 1][1], positions[-1], seen)
        predicting = mine[i][0] - shift
        token = dict(mine[:i]).get(predicting, token_at(predicting)) if predicting >= begin else None
        if token is not None:
            check(check_row[i + 1], token if shift else MASK, predicting, seen)


@settings(max_examples=200, deadline=None)
@given(case=drafted())
def test_rows_hold_and_see_what_the_definition_says(case: tuple[State, int]) -> None:
    state, ranks = case
    host = state.to_host()
    known = {0, MASK, *state.canvas.flatten().tolist(), *state.chain[1].flatten().tolist()}
    known |= set(state.edit_token.flatten().tolist())
    for rank in range(ranks):
        batch = layout(state, host, Share(rank, ranks))
        assert set(batch.tokens.tolist()) <= known, "rows that are not used run, too: of tokens that the model has"
        assert (batch.drafts is None) == bool((host.drafts < 2).all())
        if batch.drafts is not None:
            for g in np.nonzero(batch.table.branch >= 0)[0].tolist():
                check_segment(state, host, batch, g)
            assert len(batch.heads.predictions.rows) == len(batch.heads.slots) == len(batch.heads.sequence)
            assert len(set(batch.heads.slots.tolist())) == len(batch.heads.slots), "two predictions for one place"
