"""What keeping K/V of filled tokens (decode.cache=token) does to tokens a second: ratios, run beside run.

    python -m benchmarks.kept_tokens                 # 1, 16 and 64 in flight, three rounds: eight minutes

On one thread, the embedded model. Every round runs each way of decoding with cache=block and with cache=token, one
right after the other, and the medians of their ratios are printed: whatever else the machine does meanwhile, both
share.
Results go to benchmarks/results/kept_tokens.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.embedded import RESULTS
from benchmarks.in_flight import BASE, ONE, VERIFIED, generate
from lopa_dist.config import ModelOptions
from lopa_dist.jobs.build import EngineBuilder

PROBLEMS = {1: 24, 16: 64, 64: 96}  # by sequences in flight
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "control": {"extra_fill": 1},
    "10 drafts": VERIFIED | {"drafts": 10},
    "plain, one block": ONE,
    "10 drafts, one block": VERIFIED | {"drafts": 10} | ONE,
}


def main() -> None:
    """Measure, print, and keep the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    builder = EngineBuilder(ModelOptions(dtype="fp32"), torch.device("cpu"))
    ratios: dict[str, list[float]] = {}
    for _, (in_flight, problems), (name, setting) in product(range(rounds), PROBLEMS.items(), SETTINGS.items()):
        block, token = (
            generate(builder, replace(BASE, **setting | cache), in_flight, problems)["tokens_per_s"]
            for cache in ({}, {"cache": "token"})
        )
        ratios.setdefault(f"{name}, {in_flight} in flight", []).append(token / block)
    table = Table("decoding", *(f"{n} in flight" for n in PROBLEMS), title="tokens a second, cache=token / cache=block")
    for name in SETTINGS:
        cells = (ratios[f"{name}, {n} in flight"] for n in PROBLEMS)
        table.add_row(name, *(f"{statistics.median(r):.2f} ({min(r):.2f} to {max(r):.2f})" for r in cells))
    Console(width=100).print(table)
    report = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__, "ratios": ratios}
    (RESULTS / "kept_tokens.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
