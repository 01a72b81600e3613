"""The clock of the GPU benchmarks.

A time is the median over several runs. `Clock.queued` times what a function does on the GPU, and `Clock.graph` what a
CUDA graph of it does. Their runs are queued, so the host's time is not included. Before each run, enough other data is
read to clear the L2 cache of what the run will read; in a step, the weights have this effect. `Clock.wall` includes the
host's time. On a CPU a function runs once, and nothing is measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from lopa_dist.engine.static_runner import Replay
from lopa_dist.engine.statistics import device_mark

UNKNOWN_CACHE = 64 << 20  # bytes of the L2 cache to assume if torch does not tell its size
FLUSHED = 5  # data of this many times the L2 cache's size is read between runs


class Clock:
    """Measures functions on one device; all times are None on a CPU.

    Attributes:
        cache: bytes of the L2 cache; 0 on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.gpu, self.cache = device, device.type == "cuda", 0
        if self.gpu:
            properties = torch.cuda.get_device_properties(device)
            self.cache = getattr(properties, "L2_cache_size", 0) or UNKNOWN_CACHE
            self.other = torch.zeros(FLUSHED * self.cache, dtype=torch.int8, device=device).view(torch.int32)

    def queued(self, function: Callable[[], object], repeats: int = 20) -> float | None:
        """Return the median milliseconds of a function that queues work; two more runs before them do not count."""
        if self.gpu:
            return median_ms(function, self.device, repeats, self.other.amax)
        function()
        return None

    def graph(self, function: Callable[[], object], repeats: int = 20) -> float | None:
        """Return what `queued` returns for a CUDA graph of the function."""
        return self.queued(graphed(function, self.device), repeats)

    def wall(self, function: Callable[[], object], repeats: int = 10) -> float | None:
        """Return the median milliseconds from the call until the device is done, so the host's time is included."""
        if not self.gpu:
            function()
            return None
        times = []
        for _ in range(repeats + 3):
            torch.cuda.synchronize(self.device)
            began = time.perf_counter()
            function()
            torch.cuda.synchronize(self.device)
            times.append(1e3 * (time.perf_counter() - began))
        return statistics.median(times[3:])


def graphed(function: Callable[[], object], device: torch.device) -> Callable[[], None]:
    """Return a function that runs `function` at first, then captures it as a CUDA graph and replays the graph."""

    def run() -> None:
        function()

    return partial(Replay(), run, device, None)


def median_ms(
    function: Callable[[], object], device: torch.device, repeats: int, before: Callable[[], object]
) -> float:
    """Return the median milliseconds of what `function` queues on a GPU; two more runs before them do not count.

    `before` is called before each run and is not timed.
    """
    marks = []
    for _ in range(repeats + 2):
        before()
        begin = device_mark(device)
        function()
        marks.append((begin, device_mark(device)))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return statistics.median(begin.elapsed_time(end) for begin, end in marks[2:])
