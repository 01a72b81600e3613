"""The host's time that a GPU waits for: from the arrival of a step's copy to the launch of the next forward.

The forward is the static runner's, whose inputs are laid out, cut into tiles and copied before the launch. On a CPU the
transformer and the head can be left out (`forward_s`), for they would empty the caches, which a GPU's do not: records
of an earlier run then take the place of theirs. The clock is processor time, which other processes do not lengthen, or
on a GPU, where the host waits in a loop, the wall clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from lopa_dist.engine.runner import Prepared
from lopa_dist.engine.static_runner import Body, Replay, StaticRunner
from lopa_dist.engine.statistics import Statistics


class Exposed:
    """Milliseconds of each step that found the host with something to do."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self.clock = clock
        self.steps: list[float] = []
        self.rows: list[int] = []  # of these steps
        self.arrived: float | None = None

    def watch(self, statistics: Statistics) -> None:
        """Note when copies arrive in an engine with these statistics."""
        lap = statistics.lap

        def noted(phase: str, waited: bool = False) -> None:
            lap(phase, waited)
            if waited:
                self.arrived = self.clock()

        statistics.lap = noted  # type: ignore[method-assign]

    def launched(self, body: Body) -> None:
        """Note that a forward is launched."""
        if self.arrived is not None:
            self.steps.append(1000 * (self.clock() - self.arrived))
            self.rows.append(len(body.tokens))
        self.arrived = None

    @contextmanager
    def launches(self, records: list[Tensor] | None = None, forward_s: float = 0.0) -> Iterator[None]:
        """Note launches of forwards; with `records`, a forward takes `forward_s` seconds, and they are its results."""
        replay, run = Replay.__call__, StaticRunner.run
        left = iter(records or [])

        def noted(graph: Replay, function: Any, device: torch.device, memory: Any) -> None:
            of_body = isinstance(function.func.__self__, Body)
            if of_body:
                self.launched(function.func.__self__)
            if records is None:
                replay(graph, function, device, memory)
            elif of_body:
                end = time.perf_counter() + forward_s
                while time.perf_counter() < end:
                    pass

        def replayed(runner: StaticRunner, prepared: Prepared) -> Tensor:
            made = run(runner, prepared)
            return made if records is None else next(left)

        with patch.object(Replay, "__call__", noted), patch.object(StaticRunner, "run", replayed):
            yield


@contextmanager
def recorded(records: list[Tensor]) -> Iterator[None]:
    """Append the records of all forwards to `records`."""
    run = StaticRunner.run

    def recording(self: StaticRunner, prepared: Prepared) -> Tensor:
        records.append(run(self, prepared))
        return records[-1]

    with patch.object(StaticRunner, "run", recording):
        yield
