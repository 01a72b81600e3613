"""Measure exposed time: the host's time that a GPU waits for.

Exposed time runs from the moment when a step's results have been copied to the host until the launch of the next
forward. Before the static runner launches a forward, it lays out the inputs, cuts them into tiles and copies them. Then
it launches a graph, or for steps above the ladder of buckets, the network itself.

On a CPU the transformer and the head can be left out: they would empty the host's caches, which a GPU's work does not.
Records of an earlier run then replace their results.

The default clock is processor time, which other processes do not lengthen. On a GPU, where the host waits in a loop,
use the wall clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from lopa_dist.engine import loop
from lopa_dist.engine.chains import Chains
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.memory import ready_slots
from lopa_dist.engine.runner import Prepared, Runner
from lopa_dist.engine.running_batch import RunningBatch
from lopa_dist.engine.static_runner import Body, Replay, StaticRunner
from lopa_dist.engine.statistics import Statistics
from lopa_dist.models.fused import FusedTransformer
from lopa_dist.rows.causal_rows import CausalRows
from lopa_dist.rows.window_rows import WindowRows

PARTS: dict[str, tuple[tuple[Any, str], ...]] = {
    "received": ((Chains, "received"),), "commit": ((loop, "commit"),), "end": ((RunningBatch, "end"),),
    "end_step": ((Engine, "end_step"),), "admit": ((RunningBatch, "admit"),), "draft": ((Chains, "draft"),),
    "layout": ((CausalRows, "layout"), (WindowRows, "layout")), "prepare": ((StaticRunner, "prepare"),),
    "load": ((Body, "load"),),
}  # fmt: skip
"""Parts of exposed time, in their order: functions that call none of the others."""


class Exposed:
    """Notes the exposed milliseconds of each step whose launch follows the results of an earlier step.

    Args:
        clock: returns seconds.
        parts: whether to time `PARTS`, too.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time, parts: bool = False) -> None:
        self.clock = clock
        self.steps: list[float] = []  # exposed milliseconds
        # of each of `PARTS`, of the same steps; empty without `parts`
        self.parts: dict[str, list[float]] = {name: [] for name in PARTS} if parts else {}
        self.spent = dict.fromkeys(self.parts, 0.0)  # of a step that is under way
        self.rows: list[int] = []  # rows of the same steps, padding included
        self.arrived: float | None = None  # when results arrived; None after the next launch

    def watch(self, statistics: Statistics) -> None:
        """From now on, note when results arrive at the host in the engine that has these `statistics`."""
        lap = statistics.lap

        def noted(phase: str, waited: bool = False) -> None:
            lap(phase, waited)
            if waited:
                self.spent = dict.fromkeys(self.parts, 0.0)
                self.arrived = self.clock()

        statistics.lap = noted  # type: ignore[method-assign]

    def launched(self, rows: int) -> None:
        """Note that a forward of `rows` rows is launched; a second launch before other results arrive is not noted."""
        if self.arrived is not None:
            self.steps.append(1000 * (self.clock() - self.arrived))
            self.rows.append(rows)
            for name, milliseconds in self.spent.items():
                self.parts[name].append(milliseconds)
        self.arrived = None

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, made to count as the part `name` when it is called in exposed time."""

        def called(*given: Any, **named: Any) -> Any:
            if self.arrived is None:
                return function(*given, **named)
            began = self.clock()
            result = function(*given, **named)
            self.spent[name] += 1000 * (self.clock() - began)
            return result

        return called

    @contextmanager
    def launches(self, records: list[Tensor] | None = None, forward_s: float = 0.0) -> Iterator[None]:
        """Note launches of forwards within this context.

        With `records`, no forward is computed: each one waits `forward_s` seconds, and its result is the next one of
        `records`.
        """
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
            ExitStack() as patches,
        ):
            for name in self.parts:
                for owner, attribute in PARTS[name]:
                    patches.enter_context(patch.object(owner, attribute, self.timed(name, getattr(owner, attribute))))
            yield


@contextmanager
def recorded(records: list[Tensor]) -> Iterator[None]:
    """Append the records of all forwards within this context to `records`.

    Any runner may compute them: within this context, all run the steps that a GPU would run.
    """
    forward = Runner.forward

    def recording(self: Runner, prepared: Prepared) -> Tensor:
        records.append(forward(self, prepared))
        return records[-1]

    def ready(sequences: int, static: bool) -> int:
        return ready_slots(sequences, static=True)

    with patch.object(Runner, "forward", recording), patch.object(loop, "ready_slots", ready):
        yield
