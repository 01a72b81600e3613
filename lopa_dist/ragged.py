"""What the host works out in numpy, ragged shapes above all, and how it gets to the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
UNBOUNDED = 2**30  # a bound above all numbers of rows, columns and drafts
ROW_TILE = 16  # rows are padded to a multiple of this: matrix kernels then give a row the same bits in any batch


def padded(rows: int) -> int:
    """Return a number of rows, rounded up to whole tiles."""
    return -(-rows // ROW_TILE) * ROW_TILE


def begins(counts: Ints) -> Ints:
    """Return where runs of these lengths begin that stand one behind the other: ``begins([3, 2, 4])`` is 0, 3, 5."""
    return counts.cumsum() - counts


def ranges(first: Ints, counts: Ints) -> Ints:
    """Return `counts` numbers from each `first` on, in one array: ``ranges([5, 9], [3, 2])`` is 5, 6, 7, 9, 10."""
    return np.arange(counts.sum()) + (first - begins(counts)).repeat(counts)


def ragged_arange(counts: Ints) -> Ints:
    """Return `counts` numbers from 0 on, each time, in one array: ``ragged_arange([3, 2])`` is 0, 1, 2, 0, 1."""
    ends = counts.cumsum()
    return np.arange(ends[-1] if len(ends) else 0) - (ends - counts).repeat(counts)


def pinned(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return an array as a tensor on the host from which copies to a GPU need not be waited for."""
    host = torch.from_numpy(array)
    return host.pin_memory() if device.type == "cuda" else host


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return an array on the device. The host does not wait, as with a plain copy, for what a GPU still has to do."""
    return pinned(array, device).to(device, non_blocking=True)


def together(device: torch.device, **arrays: Ints) -> dict[str, Tensor]:
    """Return several arrays on the device, by their names; one transfer takes them all. On a CPU nothing is copied."""
    if device.type == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    sent = to_device(np.concatenate(list(arrays.values())), device)
    return dict(zip(arrays, sent.split([len(array) for array in arrays.values()]), strict=True))
