"""Measure the host time of a step, with one and with many sequences in flight.

    python -m benchmarks.host_time

Prints medians over steps, in milliseconds and as a share of the forward, and tokens per second, for one thread and for
all cores. Writes them to benchmarks/results/host_time.json. The ways of decoding take turns, so that other work on the
machine affects all of them alike.

Host time is all time of a step except the model's forward, and includes the preparation of attention.

Exposed time is the part that a GPU would wait for, on the path that a GPU runs (`benchmarks.exposed`), in processor
time. To measure it, a run on one thread is repeated with its records; instead of running the model, the host watches
the clock for `FORWARD_S`. The same figures are given for all cores, since they are one thread's processor time.

As in a job, a new request begins when another one ends, and there are at least four times as many requests as are in
flight. So with one in flight, most steps find the structure of an earlier step (`rows.window_rows`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from itertools import product
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.answers import requests_of
from benchmarks.exposed import Exposed, recorded
from benchmarks.results import RESULTS
from lopa_dist.config import ModelOptions
from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.request import Request
from lopa_dist.engine.statistics import PHASES
from lopa_dist.jobs.setup.build import EngineBuilder
from lopa_dist.tasks.embedded import Arithmetic

EXPOSED = "exposed"
FORWARD_S = 0.001  # a longer wait does not change exposed times
RUNS = {1: (1, 128), 8: (2, 32), 64: (1, 256)}  # by sequences in flight: how many runs, and how many requests in each
DECODINGS: dict[str, dict[str, Any]] = {
    "plain": {"branches": 0},
    "control": {"branches": 0, "extra_fill": 1},
    "LoPA, k = 7": {"branches": 7},
    "verified, 10 drafts": {"branches": 0, "verify": "agreement", "drafts": 10},
    "verified, 16 drafts": {"branches": 0, "verify": "agreement", "drafts": 16},
}


class Steps:
    """Appends to `steps` the milliseconds that each step spent in each phase."""

    def __init__(self, steps: list[dict[str, float]]) -> None:
        self.steps, self.before = steps, dict.fromkeys(PHASES, 0.0)

    def __call__(self, engine: Engine) -> None:
        """Note a step that has ended; the work after it (collecting, admitting) counts for the next step."""
        clock = engine.statistics
        self.steps.append({phase: 1000 * (clock.seconds[phase] - self.before[phase]) for phase in PHASES})
        self.before = dict(clock.seconds)


def generate(
    builder: EngineBuilder, config: DecodeConfig, sequences: int, requests: list[Request], steps: list[dict[str, float]]
) -> tuple[int, list[Tensor]]:
    """Answer the requests with `sequences` in flight; return the number of tokens, and the records of all forwards.

    The milliseconds of each step are appended to `steps`.
    """
    engine, records = builder.engine(config, EngineConfig(sequences), on_step=Steps(steps)), list[Tensor]()
    with recorded(records):
        return sum(len(generation.tokens) for generation in engine.generate(requests)), records


def exposed(
    builder: EngineBuilder, config: DecodeConfig, sequences: int, requests: list[Request], records: list[Tensor]
) -> list[float]:
    """Return the exposed milliseconds of each step but the first, in a run with the `records` of an earlier run."""
    options = EngineConfig(sequences, attention="meta", graphs="always")
    watched, engine = Exposed(), builder.engine(config, options)
    watched.watch(engine.statistics)
    with watched.launches(records, FORWARD_S):
        list(engine.generate(requests))
    return watched.steps


def main() -> None:
    """Measure every case; print and write the results."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    builder = EngineBuilder(ModelOptions(dtype="fp32"), torch.device("cpu"))
    items = list(Arithmetic(256).items())
    rows: list[dict[str, Any]] = []
    alone: dict[tuple[int, str], list[float]] = {case: [] for case in product(RUNS, DECODINGS)}
    for threads, sequences in product(sorted({1, len(os.sched_getaffinity(0))}), RUNS):
        torch.set_num_threads(threads)
        steps: dict[str, list[dict[str, float]]] = {name: [] for name in DECODINGS}
        rates: dict[str, list[float]] = {name: [] for name in DECODINGS}
        runs, count = RUNS[sequences]
        for run, name in product(range(runs), DECODINGS):
            config = DecodeConfig(
                block_size=16, max_new_tokens=64, **{"verify": "confidence", "drafts": 0, **DECODINGS[name]}
            )
            chosen = [items[(run * count + i) % len(items)] for i in range(count)]
            requests = requests_of(chosen, builder.tokenizer, config.max_new_tokens)
            began = time.perf_counter()
            tokens, records = generate(builder, config, sequences, requests, steps[name])
            rates[name].append(tokens / (time.perf_counter() - began))
            if threads == 1:
                alone[sequences, name] += exposed(builder, config, sequences, requests, records)
        for name in DECODINGS:
            median = {phase: statistics.median(step[phase] for step in steps[name]) for phase in PHASES}
            median[EXPOSED] = statistics.median(alone[sequences, name])
            host = statistics.median(sum(step[p] for p in PHASES) - step["forward"] for step in steps[name])
            about = {"threads": threads, "decoding": name, "sequences": sequences, "steps": len(steps[name])}
            rate = statistics.median(rates[name])
            rows.append({**about, "tokens_per_s": rate, "host_ms": host, **median})
    table = Table(title="Milliseconds per step (median of steps), and tokens per second (median of runs)")
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
