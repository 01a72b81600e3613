"""Ragged index arithmetic equals what it says, written as loops."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lopa_dist.ragged import begins, ragged_arange, ranges


@given(st.lists(st.tuples(st.integers(-50, 50), st.integers(0, 5)), max_size=6))
def test_ranges(pairs: list[tuple[int, int]]) -> None:
    first, counts = np.array(pairs, np.int64).reshape(-1, 2).T
    assert ranges(first, counts).tolist() == [n for begin, count in pairs for n in range(begin, begin + count)]
    assert ragged_arange(counts).tolist() == [n for _, count in pairs for n in range(count)]
    assert begins(counts).tolist() == [sum(count for _, count in pairs[:i]) for i in range(len(pairs))]
