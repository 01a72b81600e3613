"""Copies the host's arrays and numbers to the device, and tensors back while the device works on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lopa_dist.ragged import Ints

ALIGNED = 256  # bytes: each staged array begins at a multiple of this
STAGED = 1 << 23  # bytes of pinned memory for each thread and GPU


class Staging:
    """Pinned memory of the host, through which arrays go to a GPU, so that the host need not wait for the copies.

    When it is full, the host waits for the GPU's work so far, and begins again. Taking a part of it costs the host much
    less than pinning an array: beside an H200, that was a fifth of the host's time in a step.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        """Pin `size` bytes for transfers to `device`; a CPU gets the same memory, unpinned, for tests."""
        self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.device, self.at = device, 0

    def take(self, array: NDArray[Any]) -> Tensor | None:
        """Return a copy of an array, to be copied to the device at once; None if the memory is too small for it."""
        size = array.nbytes
        if size > len(self.memory):
            return None
        if self.at + size > len(self.memory):
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.at = 0
        host = torch.from_numpy(array)
        part = self.memory[self.at : self.at + size].view(host.dtype).view(host.shape)
        self.at += -(-size // ALIGNED) * ALIGNED
        return part.copy_(host)


class OfThread(threading.local):
    """Each thread's staging memory: another thread could reuse a part before it is copied."""

    def __init__(self) -> None:
        self.by_device: dict[torch.device, Staging] = {}


STAGING = OfThread()


def pinned(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return an array as a tensor on the host, pinned for a GPU, to be copied there at once."""
    if device.type != "cuda":
        return torch.from_numpy(array)
    if device not in STAGING.by_device:
        STAGING.by_device[device] = Staging(STAGED, device)
    found = STAGING.by_device[device].take(array)
    return torch.from_numpy(array).pin_memory() if found is None else found


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return an array on the device. Unlike with a plain copy, the host does not wait for a GPU's pending work."""
    return pinned(array, device).to(device, non_blocking=True)


def to_host_later(tensor: Tensor) -> Callable[[], Tensor]:
    """Begin to copy a tensor to the host, and return a function that returns the copy.

    That function waits for the copy, but not for later work of the device. On a CPU it returns the tensor itself.
    """
    if tensor.device.type != "cuda":
        return lambda: tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(tensor.device))

    def wait() -> Tensor:
        copied.synchronize()
        return copy

    return wait


def together(device: torch.device, **arrays: Ints) -> dict[str, Tensor]:
    """Return several arrays on the device, by their names, all sent in one transfer. On a CPU nothing is copied."""
    if device.type == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    sent = to_device(np.concatenate(list(arrays.values())), device)
    return dict(zip(arrays, sent.split([len(array) for array in arrays.values()]), strict=True))


def every_row(x: Tensor) -> Tensor:
    """Return how many rows `x` has, ``[1]`` int32 on its device: kernels read there how many rows are real."""
    return torch.full((1,), len(x), dtype=torch.int32, device=x.device)
