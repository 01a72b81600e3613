"""What a causal model drafts next."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lopa_dist.decode import Admitted, DecodeConfig, State, Vocabulary
from lopa_dist.decode.state import Records
from lopa_dist.engine.chain_change import change_of
from lopa_dist.rows.causal_rows import row_counts
from lopa_dist.rows.lookahead import Lookahead
from lopa_dist.rules.causal import advance, chains, put_chains, spawn, verify
from tests.decode.admission import admit_all

MASK, EOS = 99, 7


@pytest.mark.parametrize(
    ("predicted", "stop_at_eos", "drafted", "masks"),
    [
        ([1, 2, 3, 4], True, 4, 4),
        ([1, 2, EOS, 4], True, 2, 0),
        ([EOS, 2, 3, 4], True, 0, 0),
        ([1, 2, EOS, 4], False, 4, 4),
        ([1, 2, -1, EOS], True, 2, 4),  # a mask that did not run predicts nothing, and what comes after it neither
    ],
)
def test_nothing_is_drafted_after_an_end(predicted: list[int], stop_at_eos: bool, drafted: int, masks: int) -> None:
    """Nor is the end itself: the row before it predicts it, and nobody asks what would come then."""
    config = DecodeConfig(
        branches=0, context="causal", drafts=4, draft_from="masks", max_new_tokens=40, stop_at_eos=stop_at_eos
    )
    state = State.empty(config, Vocabulary(MASK, (EOS,), True), 1, 3, torch.device("cpu"))
    admit_all(state, [Admitted(0, [5, 6], 40, 1, False)], state.to_host())
    groups = torch.zeros(3, 1, 1, 1, 4, dtype=torch.int32)  # one branch
    groups[0, 0, 0, 0] = torch.tensor(predicted)
    chain = torch.zeros(3, 1, 1, 1, dtype=torch.int32)
    chain[0] = 11
    winner = verify(state, Records(chain, Records(groups)))
    advance(state, winner)
    spawn(state, winner, None)
    host = state.to_host()
    assert host.drafts[0] == drafted
    found, rows, *_ = row_counts(host, Lookahead(4, (0, 4)))
    assert found[0, drafted] == masks
    assert found.sum() == masks + 4 * (drafted > 0)  # the group after the pending token runs, whatever ends the chain
    assert rows[0] == drafted + 1 + found.sum()


@given(branches=st.integers(0, 2), slots=st.sets(st.integers(0, 4), min_size=1), data=st.data())
def test_put_chains_changes_what_they_are_and_nothing_else(branches: int, slots: set[int], data: st.DataObject) -> None:
    m = 3
    config = DecodeConfig(branches=branches, context="causal", drafts=m, max_new_tokens=10)
    state = State.empty(config, Vocabulary(MASK, (EOS,), True), 5, 3, torch.device("cpu"))
    host = admit_all(state, [Admitted(s, [5, 6], 10, 1, False) for s in range(5)], state.to_host())
    at, n = np.array(sorted(slots)), len(slots)
    numbers = st.integers(10, 90)
    tokens = np.array(data.draw(st.lists(st.lists(numbers, min_size=m, max_size=m), min_size=n, max_size=n)))
    counts = np.array(data.draw(st.lists(st.integers(0, m), min_size=n, max_size=n)))
    eos = np.array(data.draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)))
    paths = [data.draw(st.lists(st.lists(numbers, min_size=c, max_size=c), max_size=branches)) for c in counts.tolist()]
    expected, canvas, chain = state.to_host(), state.canvas.clone(), chains(state).clone()
    for number, slot in enumerate(at.tolist()):
        expected.drafts[slot], expected.expects_eos[slot] = counts[number], eos[number]
        expected.branches[slot] += len(paths[number])
        begin = state.origin + int(host.complete[slot])
        canvas[slot, begin : begin + m] = chain[slot, 0] = torch.from_numpy(tokens[number])
        for branch, path in enumerate(paths[number], 1):
            chain[slot, branch, : len(path)] = torch.tensor(path)
    change = change_of(state.chain_places, at, host.complete[at], tokens, counts, eos)
    after = put_chains(state, host, at, counts, eos, change, paths if branches else ())
    for knows, sent, wanted in zip(after, state.to_host(), expected, strict=True):
        assert np.array_equal(knows, wanted)
        assert np.array_equal(sent, wanted)
    assert state.canvas.equal(canvas)
    assert chains(state).equal(chain)
