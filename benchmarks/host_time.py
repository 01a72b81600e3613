"""Host time of a step: everything but the model's forward, for 1 and for many sequences in flight.

    python -m benchmarks.host_time

Prints medians over steps, in milliseconds and as a share of the forward, with the tokens a second that many in flight
give, for one thread and for all cores, and writes benchmarks/results/host_time.json. The ways of decoding take turns,
run by run, so that they share whatever else the machine does meanwhile.
Host time is all of a step but the model's forward, the preparation of its attention included. Exposed is what of it a
device would wait for: from the arrival of the step's copy to where the next forward is prepared. It is measured while
the host is left alone, as by a GPU: every run is repeated with its records, and where the model would run, the host
only looks at the clock for `FORWARD_S`. A forward on the CPU empties its caches, which makes what follows slower.
Requests come one after the other, as in a job, many times as many as are in flight: with one, most steps then find
the structure of an earlier one (`rows.layout`).
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.embedded import RESULTS, requests_of
from lopa_dist.config import ModelOptions
from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.request import Request
from lopa_dist.engine.runner import Prepared, Runner
from lopa_dist.engine.statistics import PHASES, Statistics
from lopa_dist.jobs.setup.build import EngineBuilder
from lopa_dist.tasks.arithmetic import Arithmetic

EXPOSED = "exposed"
FORWARD_S = 0.005
RUNS = {1: (1, 128), 8: (2, 32), 64: (1, 256)}  # by sequences in flight: how often, and how many requests each time
DECODINGS: dict[str, dict[str, Any]] = {
    "plain": {"branches": 0},
    "control": {"branches": 0, "extra_fill": 1},
    "LoPA, k = 7": {"branches": 7},
    "verified, 10 drafts": {"branches": 0, "verify": "agreement", "drafts": 10},
    "verified, 16 drafts": {"branches": 0, "verify": "agreement", "drafts": 16},
}


class Steps:
    """Appends what each step spent on each phase, in milliseconds, and `EXPOSED`."""

    def __init__(self, steps: list[dict[str, float]]) -> None:
        self.steps, self.before = steps, dict.fromkeys(PHASES, 0.0)
        self.arrived, self.exposed = 0.0, 0.0

    def watch(self, clock: Statistics) -> None:
        """Note when the copy to the host arrives, and when the next forward is prepared."""
        lap = clock.lap

        def noted(phase: str, waited: bool = False) -> None:
            lap(phase, waited)
            now = time.perf_counter()
            if waited:
                self.arrived = now
            elif phase == "host":
                self.exposed = 1000 * (now - self.arrived)  # admitting is a lap of its own; the last one counts

        clock.lap = noted  # type: ignore[method-assign]

    def __call__(self, engine: Engine) -> None:
        """After a step; what follows it (collecting, admitting) counts with the next."""
        clock = engine.statistics
        spent = {phase: 1000 * (clock.seconds[phase] - self.before[phase]) for phase in PHASES}
        self.steps.append(spent | ({EXPOSED: self.exposed} if self.before["forward"] else {}))
        self.before = dict(clock.seconds)


@contextmanager
def recorded(records: list[Tensor]) -> Iterator[None]:
    """Append the records of all forwards to `records`."""
    run = Runner.run

    def recording(self: Runner, prepared: Prepared) -> Tensor:
        records.append(run(self, prepared))
        return records[-1]

    with patch.object(Runner, "run", recording):
        yield


@contextmanager
def replayed(records: list[Tensor]) -> Iterator[None]:
    """Forwards give `records` one after the other, without the model."""
    left = iter(records)

    def replay(self: Runner, prepared: Prepared) -> Tensor:
        end = time.perf_counter() + FORWARD_S
        while time.perf_counter() < end:
            pass
        return next(left)

    with patch.object(Runner, "run", replay):
        yield


def generate(
    builder: EngineBuilder, config: DecodeConfig, sequences: int, requests: list[Request], steps: list[dict[str, float]]
) -> int:
    """Return how many tokens the requests get, with so many in flight, and append what their steps take to `steps`."""
    watcher = Steps(steps)
    engine = builder.engine(config, EngineConfig(sequences), on_step=watcher)
    watcher.watch(engine.statistics)
    return sum(len(generation.tokens) for generation in engine.generate(requests))


def main() -> None:
    """Measure and print."""
    builder = EngineBuilder(ModelOptions(dtype="fp32"), torch.device("cpu"))
    items = list(Arithmetic(256).items())
    rows: list[dict[str, Any]] = []
    for threads, sequences in product(sorted({1, len(os.sched_getaffinity(0))}), RUNS):
        torch.set_num_threads(threads)
        steps: dict[str, list[dict[str, float]]] = {name: [] for name in DECODINGS}
        alone: dict[str, list[dict[str, float]]] = {name: [] for name in DECODINGS}
        rates: dict[str, list[float]] = {name: [] for name in DECODINGS}
        runs, count = RUNS[sequences]
        for run, name in product(range(runs), DECODINGS):
            config = DecodeConfig(
                block_size=16, max_new_tokens=64, **{"verify": "confidence", "drafts": 0, **DECODINGS[name]}
            )
            chosen = [items[(run * count + i) % len(items)] for i in range(count)]
            requests = requests_of(chosen, builder.tokenizer, config.max_new_tokens)
            records: list[Tensor] = []
            with recorded(records):
                began = time.perf_counter()
                tokens = generate(builder, config, sequences, requests, steps[name])
                rates[name].append(tokens / (time.perf_counter() - began))
            with replayed(records):
                generate(builder, config, sequences, requests, alone[name])
        for name in DECODINGS:
            median = {phase: statistics.median(step[phase] for step in steps[name]) for phase in PHASES}
            median[EXPOSED] = statistics.median(step[EXPOSED] for step in alone[name] if EXPOSED in step)
            host = statistics.median(sum(step[p] for p in PHASES) - step["forward"] for step in steps[name])
            about = {"threads": threads, "decoding": name, "sequences": sequences, "steps": len(steps[name])}
            rate = statistics.median(rates[name])
            rows.append({**about, "tokens_per_s": rate, "host_ms": host, **median})
    table = Table(title="Milliseconds a step (median of steps), and tokens a second (median of runs)")
    for column in (
        "threads",
        "decoding",
        "sequences",
        "tokens/s",
        "host (all but forward)",
        "share of forward",
        *PHASES,
        EXPOSED,
    ):
        table.add_column(column, justify="right")
    for r in rows:
        shown = (str(r["threads"]), str(r["decoding"]), str(r["sequences"]), f"{r['tokens_per_s']:.0f}")
        share = f"{r['host_ms'] / r['forward']:.0%}"
        table.add_row(*shown, f"{r['host_ms']:.2f}", share, *(f"{r[p]:.2f}" for p in (*PHASES, EXPOSED)))
    Console(width=150).print(table)
    RESULTS.mkdir(exist_ok=True)
    report = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__, "rows": rows}
    (RESULTS / "host_time.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
