"""What the parts of `gpu_step` share: rows of the table, and the clock of a GPU.

A time is the median of replays of one CUDA graph. Before each replay, what it will read is driven out of the L2 cache
by reading something else, as a step's weights do; replays are queued, so that the host's time is not in them. On a CPU
a function runs once, and nothing is measured.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import torch

from benchmarks.roofline import Bar, Deadline, Machine
from lopa_dist.engine.static_runner import Replay
from lopa_dist.engine.statistics import device_mark
from lopa_dist.models.config import ModelConfig

UNKNOWN_CACHE = 64 << 20  # bytes, where torch does not say
FLUSHED = 5  # times the L2 cache's size is read between replays


@dataclass
class Row:
    """One line: figures by name, null where not measured."""

    part: str
    case: str
    figures: dict[str, float | None]
    bars: list[Bar] = field(default_factory=list)
    note: str = ""


class Bench:
    """A device, a deadline, and what was measured of the device."""

    def __init__(self, device: torch.device, deadline: Deadline) -> None:
        self.device, self.deadline = device, deadline
        self.toy = device.type != "cuda"
        self.machine: Machine | None = None
        self.cache = cache_bytes(device)
        if not self.toy:
            self.other = torch.zeros(FLUSHED * self.cache, dtype=torch.int8, device=device).view(torch.int32)

    def replays(self, function: Callable[[], object], repeats: int = 20) -> float | None:
        """Median milliseconds of something that is queued, after two runs that do not count."""
        if self.toy:
            function()
            return None
        return median_ms(function, self.device, repeats, self.other.amax)

    def graph(self, function: Callable[[], object], repeats: int = 20) -> float | None:
        """As `replays`, of a graph of the function."""
        return self.replays(graphed(function, self.device), repeats)

    def wall(self, function: Callable[[], object], repeats: int = 10) -> float | None:
        """Median milliseconds until the device is done, the host's time included."""
        if self.toy:
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

    def laps(self, run: Callable[[Callable[[], None]], object]) -> float | None:
        """Median milliseconds between calls of what `run` is handed, of the second half: the first warms up."""
        marks: list[float] = []
        run(lambda: marks.append(time.perf_counter()))
        times = [1e3 * (after - before) for before, after in pairwise(marks)]
        return None if self.toy else statistics.median(times[len(times) // 2 :])

    def fill(self, row: Row, measure: Callable[[Row], None]) -> None:
        """Measure a row, unless the time is up. What fails on a GPU is written into the row, and the others go on."""
        if self.deadline.over():
            row.note = "deadline"
            return
        try:
            measure(row)
        except Exception as error:
            if self.toy:
                raise
            row.figures = dict.fromkeys(row.figures)
            row.note = f"failed: {brief(error)}"

    def free(self) -> None:
        """Give the device's memory back."""
        gc.collect()
        if not self.toy:
            torch.cuda.empty_cache()

    def shape(self, config: ModelConfig) -> ModelConfig:
        """A model's shape; a toy of it where nothing is measured."""
        if not self.toy:
            return config
        return replace(
            config, vocab_size=512, hidden_size=64, layers=2, heads=4,
            kv_heads=max(4 * config.kv_heads // config.heads, 2), head_dim=16, intermediate_size=96, mask_id=511,
            eos_ids=(510,), pad_id=510,
        )  # fmt: skip


def brief(error: Exception) -> str:
    """Its kind and first line."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


def graphed(function: Callable[[], object], device: torch.device) -> Callable[[], None]:
    """The function as a CUDA graph, captured in its second run; on a CPU itself."""

    def run() -> None:
        function()

    return partial(Replay(), run, device, None)


def median_ms(
    function: Callable[[], object], device: torch.device, repeats: int, before: Callable[[], object]
) -> float:
    """Median milliseconds of something that is queued on a GPU, after two runs that do not count, without `before`."""
    marks = []
    for _ in range(repeats + 2):
        before()
        begin = device_mark(device)
        function()
        marks.append((begin, device_mark(device)))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return statistics.median(begin.elapsed_time(end) for begin, end in marks[2:])


def cache_bytes(device: torch.device) -> int:
    """A GPU's L2 cache; 0 on a CPU, where times count for nothing."""
    if device.type != "cuda":
        return 0
    return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or UNKNOWN_CACHE
