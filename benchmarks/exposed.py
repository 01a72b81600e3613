"""The host's time that a GPU waits for: from the arrival of a step's copy to the launch of the next forward.

The forward is the static runner's, whose inputs are laid out, cut into tiles and copied before the launch: of a graph,
or for steps above the ladder of buckets, of the network. On a CPU the transformer and the head can be left out, for
they would empty the caches, which a GPU's do not: records of an earlier run then take the place of theirs. The clock is
processor time, which other processes do not lengthen, or on a GPU, where the host waits in a loop, the wall clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from lopa_dist.engine.runner import Prepared, Runner
from lopa_dist.engine.static_runner import Body, Replay, StaticRunner
from lopa_dist.engine.statistics import Statistics
from lopa_dist.models.fused import FusedTransformer


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

    def launched(self, rows: int) -> None:
        """Note that a forward of `rows` rows is launched; a second launch of it is not noted."""
        if self.arrived is not None:
            self.steps.append(1000 * (self.clock() - self.arrived))
            self.rows.append(rows)
        self.arrived = None

    @contextmanager
    def launches(self, records: list[Tensor] | None = None, forward_s: float = 0.0) -> Iterator[None]:
        """Note launches of forwards; with `records`, a forward takes `forward_s` seconds, and they are its results."""
        replay, network, run = Replay.__call__, FusedTransformer.__call__, StaticRunner.run
        left = iter(records or [])

        def wait() -> None:
            end = time.perf_counter() + forward_s
            while time.perf_counter() < end:
                pass

        def replayed(graph: Replay, function: Any, device: torch.device, memory: Any) -> None:
            body = function.func.__self__
            if isinstance(body, Body):
                self.launched(len(body.tokens))
            if records is None:
                replay(graph, function, device, memory)
            elif isinstance(body, Body):
                wait()

        def called(transformer: FusedTransformer, tokens: Tensor, *given: Any, **named: Any) -> Tensor:
            self.launched(len(tokens))
            if records is None:
                return network(transformer, tokens, *given, **named)
            wait()
            return transformer.embedding.new_empty(len(tokens), transformer.embedding.shape[1])

        def answered(runner: StaticRunner, prepared: Prepared) -> Tensor:
            made = run(runner, prepared)
            return made if records is None else next(left)

        with (
            patch.object(Replay, "__call__", replayed),
            patch.object(FusedTransformer, "__call__", called),
            patch.object(StaticRunner, "run", answered),
            nullcontext() if records is None else patch.object(StaticRunner, "write_records"),
        ):
            yield


@contextmanager
def recorded(records: list[Tensor]) -> Iterator[None]:
    """Append the records of all forwards to `records`, of any runner: all of them run the same steps."""
    forward = Runner.forward

    def recording(self: Runner, prepared: Prepared) -> Tensor:
        records.append(forward(self, prepared))
        return records[-1]

    with patch.object(Runner, "forward", recording):
        yield
