"""Arrays of ragged shapes, which the host computes in numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
UNBOUNDED = 2**30  # a bound that no number of rows, columns or drafts reaches
ROW_TILE = 16  # rows are padded to a multiple of this: matrix kernels then give a row the same bits in any batch


def padded(rows: int) -> int:
    """Return the number `rows`, rounded up to whole tiles."""
    return -(-rows // ROW_TILE) * ROW_TILE


def begins(counts: Ints) -> Ints:
    """Return where each of several consecutive runs of these lengths begins: ``begins([3, 2, 4])`` is 0, 3, 5."""
    return counts.cumsum() - counts


def ranges(first: Ints, counts: Ints) -> Ints:
    """Return in one array `counts` numbers from each `first` on: ``ranges([5, 9], [3, 2])`` is 5, 6, 7, 9, 10."""
    return np.arange(counts.sum()) + (first - begins(counts)).repeat(counts)


def ragged_arange(counts: Ints) -> Ints:
    """Return in one array the numbers from 0 to below each count: ``ragged_arange([3, 2])`` is 0, 1, 2, 0, 1."""
    ends = counts.cumsum()
    return np.arange(ends[-1] if len(ends) else 0) - (ends - counts).repeat(counts)
