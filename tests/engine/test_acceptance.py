"""How many drafts are accepted is counted, or expected."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lopa_dist.engine.acceptance import Acceptance


def accepted(share: float) -> Acceptance:
    found = Acceptance()
    found.accepted[:], found.tried[:] = 1000 * share, 1000
    return found


@given(share=st.floats(0.01, 0.99), drafts=st.integers(0, 16))
def test_a_chain_ends_somewhere(share: float, drafts: int) -> None:
    ends = accepted(share).ends(drafts)
    assert len(ends) == drafts + 1
    assert sum(ends) == pytest.approx(1)
    assert ends[-1] == pytest.approx(share**drafts)


def test_an_expected_step_counts_as_the_mean_of_counted_ones() -> None:
    """A chain of two drafts with room for four ends at 0, 1 and 2 with probabilities 1/2, 1/4 and 1/4."""
    expected, counted = Acceptance(4), Acceptance(4)
    ends = np.array([[0.5, 0.25, 0.25, 0, 0]])
    for _ in range(400):
        expected.expect(ends, np.array([2]), np.array([4]))
    for accepted in (0, 0, 1, 2) * 100:
        counted.count(np.array([2]), np.array([accepted]), np.array([4]))
    assert expected.ends(4) == pytest.approx(counted.ends(4), abs=0.01)
    assert expected.length(4) == pytest.approx(counted.length(4))
