"""Tokens a second of whole generations by how many sequences are in flight.

    python -m benchmarks.in_flight                     # 256 problems each, 1, 4, 16, 64 and 256 in flight: half an hour
    python -m benchmarks.in_flight --problems 64 --in-flight 1 --in-flight 16

On one thread, the embedded model. The ways of decoding take turns, so that they share whatever else the machine does
meanwhile. Counting is as in `benchmarks.embedded`. Results go to benchmarks/results/in_flight.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.embedded import RESULTS, requests_of
from lopa_dist.config import ModelOptions
from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.jobs.setup.build import EngineBuilder
from lopa_dist.tasks.embedded import Arithmetic

IN_FLIGHT = (1, 4, 16, 64, 256)
BASE = DecodeConfig(verify="confidence", drafts=0, block_size=16, max_new_tokens=64, branches=0)
VERIFIED: dict[str, Any] = {"verify": "agreement"}
ONE: dict[str, Any] = {"max_active_blocks": 1}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain, one block": ONE,
    "control": {"extra_fill": 1},
    "control, one block": {"extra_fill": 1} | ONE,
    "4 drafts": VERIFIED | {"drafts": 4},
    "4 drafts, one block": VERIFIED | {"drafts": 4} | ONE,
    "10 drafts": VERIFIED | {"drafts": 10},
    "10 drafts, one block": VERIFIED | {"drafts": 10} | ONE,
    "16 drafts": VERIFIED | {"drafts": 16},
    "16 drafts, one block": VERIFIED | {"drafts": 16} | ONE,
    "k = 1, 8 drafts": VERIFIED | {"branches": 1, "drafts": 8},
    "k = 3, 4 drafts": VERIFIED | {"branches": 3, "drafts": 4},
    "k = 7, 1 draft": VERIFIED | {"branches": 7, "drafts": 1},
}


def main() -> None:
    """Measure, print, and keep the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=256)
    parser.add_argument("--in-flight", type=int, action="append", help=f"sequences; may be repeated ({IN_FLIGHT})")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    builder = EngineBuilder(ModelOptions(dtype="fp32"), torch.device("cpu"))
    builder.load()
    rows = []
    for in_flight in arguments.in_flight or IN_FLIGHT:
        found = {
            name: generate(builder, replace(BASE, **setting), in_flight, arguments.problems)
            for name, setting in SETTINGS.items()
        }
        rows += [{"decoding": name, "in_flight": in_flight, **figures} for name, figures in found.items()]
        show(in_flight, found)
    report = {
        "machine": platform.processor() or platform.machine(), "torch": torch.__version__,
        "problems": arguments.problems, "rows": rows,
    }  # fmt: skip
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "in_flight.json").write_text(json.dumps(report, indent=1) + "\n")


def generate(builder: EngineBuilder, config: DecodeConfig, in_flight: int, problems: int) -> dict[str, Any]:
    """Answer the problems; tokens a second, accuracy, and tokens a forward and rows a token."""
    task = Arithmetic(problems)
    items = list(task.items())
    requests = requests_of(items, builder.tokenizer, config.max_new_tokens)
    engine = builder.engine(config, EngineConfig(in_flight))
    began = time.perf_counter()
    done = list(engine.generate(requests))
    seconds = time.perf_counter() - began
    tokens = sum(len(generation.tokens) for generation in done)
    right = sum(
        bool(task.score(items[generation.request.index], builder.tokenizer.decode(generation.tokens)).correct)
        for generation in done
    )
    return {
        "tokens_per_s": tokens / seconds,
        "accuracy": right / len(done),
        "tpf": tokens / sum(generation.forwards for generation in done),
        "rows_per_token": engine.statistics.rows / tokens,
    }


def show(in_flight: int, found: dict[str, dict[str, Any]]) -> None:
    """Print what was found with so many in flight."""
    table = Table(
        "decoding", "tokens/s", "accuracy", "tokens a forward", "rows a token", title=f"{in_flight} in flight"
    )
    for name, r in found.items():
        table.add_row(
            name, f"{r['tokens_per_s']:.0f}", f"{r['accuracy']:.1%}", f"{r['tpf']:.2f}", f"{r['rows_per_token']:.1f}"
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
