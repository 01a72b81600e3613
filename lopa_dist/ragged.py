"""Arrays that the host computes in numpy, above all of ragged shapes, and their way to the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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


def pinned(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return an array as a tensor on the host, pinned for a GPU so that the host need not wait for copies to it."""
    host = torch.from_numpy(array)
    return host.pin_memory() if device.type == "cuda" else host


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return an array on the device. Unlike with a plain copy, the host does not wait for a GPU's pending work."""
    return pinned(array, device).to(device, non_blocking=True)


def together(device: torch.device, **arrays: Ints) -> dict[str, Tensor]:
    """Return several arrays on the device, by their names, all sent in one transfer. On a CPU nothing is copied."""
    if device.type == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    sent = to_device(np.concatenate(list(arrays.values())), device)
    return dict(zip(arrays, sent.split([len(array) for array in arrays.values()]), strict=True))
