"""How long a device takes for something that runs again and again."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lopa_dist.engine.static_runner import Replay
from lopa_dist.engine.statistics import Mark, device_mark


class HostMark:
    """A moment of the host's clock."""

    def __init__(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from here to another."""
        return 1e3 * (end_event.at - self.at)


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compiles(device: torch.device) -> bool:
    """Return whether kernels are compiled in their first run."""
    return device.type == "cuda"


def graphed(function: Callable[[], object], device: torch.device) -> Callable[[], None]:
    """The function as a CUDA graph, captured in its second run; on a CPU itself."""

    def run() -> None:
        function()

    return partial(Replay(), run, device, None)


def median_ms(
    function: Callable[[], object], device: torch.device, repeats: int, before: Callable[[], object] = lambda: None
) -> float:
    """Median milliseconds of something that is queued, after two runs that do not count; `before` is not in them."""
    mark: Callable[[], Mark] = partial(device_mark, device) if device.type == "cuda" else HostMark
    marks = []
    for _ in range(repeats + 2):
        before()
        begin = mark()
        function()
        marks.append((begin, mark()))
    synchronize(device)
    return statistics.median(begin.elapsed_time(end) for begin, end in marks[2:])
