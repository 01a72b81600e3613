"""What a causal model drafts next."""

from __future__ import annotations

import pytest
import torch

from lopa_dist.decode import Admitted, DecodeConfig, State, Vocabulary
from lopa_dist.decode.state import Records
from lopa_dist.rows.causal_rows import row_counts
from lopa_dist.rows.lookahead import Lookahead
from lopa_dist.rules.causal import advance, spawn, verify

MASK, EOS = 99, 7


@pytest.mark.parametrize(
    ("predicted", "stop_at_eos", "drafted", "masks"),
    [
        ([1, 2, 3, 4], True, 4, 4),
        ([1, 2, EOS, 4], True, 2, 0),
        ([EOS, 2, 3, 4], True, 0, 0),
        ([1, 2, EOS, 4], False, 4, 4),
        ([1, 2, -1, EOS], True, 2, 4),  # a mask that did not run predicts nothing, and what is behind it neither
    ],
)
def test_nothing_is_drafted_behind_an_end(predicted: list[int], stop_at_eos: bool, drafted: int, masks: int) -> None:
    """Nor is the end itself: the row before it predicts it, and nobody asks what would come then."""
    config = DecodeConfig(
        branches=0, context="causal", drafts=4, draft_from="masks", max_new_tokens=40, stop_at_eos=stop_at_eos
    )
    state = State.empty(config, Vocabulary(MASK, (EOS,), True), 1, 3, torch.device("cpu"))
    state.admit_all([Admitted(0, [5, 6], 40, 1, False)], state.to_host())
    groups = torch.zeros(3, 1, 1, 1, 4, dtype=torch.int32)  # one branch
    groups[0, 0, 0, 0] = torch.tensor(predicted)
    chain = torch.zeros(3, 1, 1, 1, dtype=torch.int32)
    chain[0] = 11
    winner = verify(state, Records(chain, Records(groups)))
    advance(state, winner)
    spawn(state, winner)
    host = state.to_host()
    assert host.drafts[0] == drafted
    found, rows, _ = row_counts(host, Lookahead(4, (0, 4)))
    assert found[0, drafted] == masks
    assert found.sum() == masks + 4 * (drafted > 0)  # the group behind the pending token runs, whatever ends the chain
    assert rows[0] == drafted + 1 + found.sum()
