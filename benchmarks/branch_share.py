"""Processor time of a step on every branch rank, replayed in one process: no other load on the machine disturbs it.

    python -m benchmarks.branch_share

Runs the embedded model with k = 7 on one rank and lays every step out again as each rank of 2 and of 4 would. So it
tells how evenly the branches fall and how the forward shrinks with the rows; it sees neither collectives nor shared
caches, which `branch_scaling.py` measures. `bound` is the speed-up that would be left with free collectives: everything
but the forward is done by every rank. Writes benchmarks/results/branch_share.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.branch_scaling import RANKS, RESULTS
from lopa_dist.config import ModelOptions
from lopa_dist.decode import DecodeConfig, ForwardBatch, HostState, SharedPrefixes, State, layout
from lopa_dist.engine import loop
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.request import Request, request_key
from lopa_dist.engine.runner import Prepared, Runner
from lopa_dist.jobs.build import EngineBuilder
from lopa_dist.tasks.arithmetic import Arithmetic

TURNS = 3  # of which the quickest counts


class Replay:
    """Stands in for `layout` and `Runner.forward` of the loop; keeps the milliseconds of every step's shares."""

    def __init__(self) -> None:
        self.forward = Runner.forward
        self.steps: list[dict[int, list[float]]] = []  # by number of ranks: each rank's forward
        self.spent = 0.0  # seconds of ours in between, which are not the loop's

    def layout(
        self, state: State, host: HostState, rank: int = 0, ranks: int = 1, prefixes: SharedPrefixes | None = None
    ) -> ForwardBatch:
        """As the loop's; remembers what it was for."""
        self.laid_out = state, host, prefixes
        return layout(state, host, rank, ranks, prefixes)

    def run(self, runner: Runner, prepared: Prepared) -> torch.Tensor:
        """The forward, after those that ranks would run."""
        began = time.process_time()
        step: dict[int, list[float]] = {}
        state, host, prefixes = self.laid_out
        for ranks in RANKS:
            shares = [runner.prepare(layout(state, host, rank, ranks, prefixes)) for rank in range(ranks)]
            step[ranks] = [min(self.milliseconds(runner, share) for _ in range(TURNS)) for share in shares]
        self.steps.append(step)
        runner.prepare(prepared.batch)
        records = self.forward(runner, prepared)
        self.spent += time.process_time() - began
        return records

    def milliseconds(self, runner: Runner, share: Prepared) -> float:
        """Processor time of one forward."""
        began = time.process_time()
        self.forward(runner, share)
        return 1000 * (time.process_time() - began)


def measure(sequences: int, problems: int) -> list[dict[str, Any]]:
    """One row for every number of ranks."""
    builder = EngineBuilder(ModelOptions(dtype="fp32"), torch.device("cpu"))
    tokenizer = builder.tokenizer
    requests = []
    for i, item in enumerate(Arithmetic(problems).items()):
        text = tokenizer.apply_chat_template(item.messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False).input_ids
        requests.append(Request(i, ids, 64, request_key(0, str(i))))
    replay = Replay()
    loop.layout = replay.layout  # type: ignore[attr-defined]
    Runner.forward = lambda runner, prepared: replay.run(runner, prepared)  # type: ignore[assignment, method-assign]
    decode = DecodeConfig(verify="confidence", drafts=0, branches=7, block_size=16, max_new_tokens=64)
    engine = builder.engine(decode, EngineConfig(sequences))
    began = time.process_time()
    for _ in engine.generate(requests):
        pass
    rest = 1000 * (time.process_time() - began - replay.spent) / len(replay.steps)
    Runner.forward = replay.forward  # type: ignore[method-assign]
    alone = np.mean([sum(step[1]) for step in replay.steps])
    rows = []
    for ranks in RANKS:
        times = np.array([step[ranks] for step in replay.steps])  # [steps, ranks]
        slowest = float(times.max(1).mean())
        rows.append(
            {
                "ranks": ranks,
                "sequences": sequences,
                "steps": len(replay.steps),
                "forward_ms": {"slowest": slowest, "mean": float(times.mean())},
                "rest_ms": rest,
                "imbalance": float(times.max(1).mean() / times.mean()),
                "bound": float((alone + rest) / (slowest + rest)),
            }
        )
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=16)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(16, options.problems) + measure(1, max(4, options.problems // 4))
    table = Table(title="Embedded model, k = 7: milliseconds of processor time a step")
    for name in ("ranks", "in flight", "forward, slowest rank", "forward, mean", "imbalance", "all else", "bound"):
        table.add_column(name, justify="right")
    for r in rows:
        forward = r["forward_ms"]
        table.add_row(
            str(r["ranks"]), str(r["sequences"]), f"{forward['slowest']:.2f}", f"{forward['mean']:.2f}",
            f"{r['imbalance']:.2f}", f"{r['rest_ms']:.2f}", f"{r['bound']:.2f}",
        )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "branch_share.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
