"""What the host works out in numpy, ragged shapes above all, and its way to the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]


def ragged_arange(counts: Ints) -> Ints:
    """``[0..counts[0]), [0..counts[1]), ...`` in one array."""
    ends = counts.cumsum()
    return np.arange(ends[-1] if len(ends) else 0) - (ends - counts).repeat(counts)


def pinned(array: NDArray[Any], device: torch.device) -> Tensor:
    """An array as a tensor on the host, where copies to the device need not be waited for."""
    host = torch.from_numpy(array)
    return host.pin_memory() if device.type == "cuda" else host


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """An array on the device. The host does not wait, as it does with a plain copy, for what a GPU still has to do."""
    return pinned(array, device).to(device, non_blocking=True)
