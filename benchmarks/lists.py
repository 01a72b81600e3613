"""Accuracy of the list model by family, its tokens per forward and rows per token, under every kind of decoding.

    python -m benchmarks.lists                                  # 800 held-out problems a setting
    python -m benchmarks.lists --model outputs/lists/checkpoint --problems 80 --only plain
    python -m benchmarks.lists --seed 2                         # the final test
    python -m benchmarks.lists --problems 3200 --items 61       # the longest lists: answers of 4 to 8 blocks

Counting is as in `benchmarks.embedded`: tokens up to the first EOS, every forward of a sequence, prefill included. The
families are run one after the other. Each setting is compared with plain decoding that makes as many tokens a forward,
by its own `tau_conf`: whatever fills more at a time must do better than a lower threshold. Results are kept in
benchmarks/results/lists.json, by the model's weights, and only what is missing is run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Column, Table

from benchmarks.embedded import LEFT_TO_RIGHT, RESULTS, UNVERIFIED, Setting, drafted, figures_of
from benchmarks.kept import Kept
from lopa_dist.config import ModelOptions
from lopa_dist.decode import DecodeConfig
from lopa_dist.jobs.setup.build import EngineBuilder
from lopa_dist.models.files import find
from lopa_dist.tasks.embedded import Lists
from lopa_dist.tasks.list_problems import BLANK, FAMILIES
from lopa_dist.tasks.task import Item

BASE: Setting = {"block_size": 16, "max_new_tokens": 144, "branches": 0}
ONE_BLOCK: Setting = {"max_active_blocks": 1}
PLAIN: dict[str, Setting] = {
    f"plain, tau_conf {tau}": {"tau_conf": tau} for tau in (0.95, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.5)
}
FRONT = ("plain", *PLAIN)
SETTINGS: dict[str, Setting] = {
    "left to right": dict(LEFT_TO_RIGHT),
    "plain": {},
    **PLAIN,
    "control +1": {"extra_fill": 1},
    "control +2": {"extra_fill": 2},
    "LoPA, k = 7": {"branches": 7},
    "verified, 10 drafts": drafted(0, 10),
    "verified, 16 drafts": drafted(0, 16),
    "verified, tree of 4": drafted(3, 10),
    "verified, tree of 8": drafted(7, 10),
    "verified, 7 branches": drafted(7, 1),
    "verified, k = 3, 2 drafts above 0.5": drafted(3, 2, tau_look=0.5),
    "verified throughout, 10 drafts": drafted(0, 10, tau_conf=1.0),
    "verified, 10 drafts above 0.3": drafted(0, 10, tau_look=0.3),
    "verified, 10 drafts above 0.5": drafted(0, 10, tau_look=0.5),
    "verified, 10 drafts above 0.7": drafted(0, 10, tau_look=0.7),
    "verified, 10 drafts above 0.8": drafted(0, 10, tau_look=0.8),
    "verified, 7 branches above 0.5": drafted(7, 1, tau_look=0.5),
    "verified, 6 drafts above 0.7, one block": drafted(0, 6, tau_look=0.7, **ONE_BLOCK),
    "plain, one block": ONE_BLOCK,
    "control +1, one block": {"extra_fill": 1, **ONE_BLOCK},
    "control +2, one block": {"extra_fill": 2, **ONE_BLOCK},
    "verified, 6 drafts, one block": drafted(0, 6, **ONE_BLOCK),
    "verified, 10 drafts, one block": drafted(0, 10, **ONE_BLOCK),
}


@dataclass(frozen=True)
class Job:
    """One measurement. `items` is the least number of items in a list; with it, there are no other problems."""

    path: str
    name: str
    problems: int
    seed: int
    block_size: int
    items: int

    @property
    def setting(self) -> Setting:
        """What is decoded with."""
        return {**BASE, **SETTINGS[self.name], "block_size": self.block_size}

    @property
    def key(self) -> str:
        """What identifies the result, besides the weights."""
        lists = [self.problems, self.seed, *([self.items] if self.items else [])]
        return json.dumps([self.setting, *lists], sort_keys=True)

    def takes(self, item: Item) -> bool:
        """Whether a problem is asked; squares have no items."""
        _, _, question = item.reference.partition(" : ")
        return not self.items or (BLANK not in question and len(question.split()) >= self.items)


def work(job: Job) -> dict[str, dict[str, Any]]:
    """Run one setting in this process, on one thread; returns the figures of each family."""
    torch.set_num_threads(1)
    builder = EngineBuilder(ModelOptions(path=job.path, pattern="d2f", dtype="fp32"), torch.device("cpu"))
    builder.load(warn=False)
    task, config = Lists(job.problems, "held_out", job.seed), DecodeConfig(**{**UNVERIFIED, **job.setting})
    items = [item for item in task.items() if job.takes(item)]
    families = {family: [item for item in items if item.custom_id.endswith(f"-{family}")] for family in FAMILIES}
    return {family: figures_of(builder, config, task, asked) for family, asked in families.items() if asked}


def run(jobs: list[Job], processes: int, console: Console) -> dict[str, dict[str, Any]]:
    """Measure what is missing; returns the figures of each setting, by family."""
    kept = Kept(RESULTS / "lists.json", find(jobs[0].path, "--model"))
    missing = [job for job in jobs if job.key not in kept.results]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for job, families in zip(missing, pool.imap(work, missing), strict=True):
            told = {name: value for name, value in asdict(job).items() if name != "path"}
            kept.put(job.key, {**told, "families": families})
            console.print(f"{job.name}: {mean(families, 'accuracy'):.1%}")
    return {job.name: kept.results[job.key]["families"] for job in jobs}


def mean(families: dict[str, Any], figure: str) -> float:
    """The mean of a figure over the families: each has as many problems as another."""
    return sum(found[figure] for found in families.values()) / len(families)


def shown(results: dict[str, dict[str, Any]]) -> list[Table]:
    """The means, and one table for each figure: settings by families."""
    tables = [summary(results)]
    for figure, title, form in (
        ("accuracy", "accuracy", "{:.1%}"),
        ("tpf", "tokens per forward", "{:.2f}"),
        ("rows_per_token", "rows per token", "{:.1f}"),
    ):
        asked = next(iter(results.values()))
        table = Table(Column("decoding", no_wrap=True), *asked, "mean", title=title)
        for name, families in results.items():
            cells = [*(families[family][figure] for family in asked), mean(families, figure)]
            table.add_row(name, *(form.format(cell) for cell in cells))
        tables.append(table)
    return tables


def summary(results: dict[str, dict[str, Any]]) -> Table:
    """Means over the families, and how many points a setting is above plain decoding of the same tokens a forward."""
    plain = sorted((mean(results[n], "tpf"), mean(results[n], "accuracy")) for n in FRONT if n in results)
    speeds, accuracies = [tpf for tpf, _ in plain], [accuracy for _, accuracy in plain]
    columns = "accuracy", "tokens a forward", "rows a token", "points above plain"
    table = Table(Column("decoding", no_wrap=True), *columns, title="means")
    for name, families in results.items():
        accuracy, tpf, rows = (mean(families, figure) for figure in ("accuracy", "tpf", "rows_per_token"))
        known = len(plain) == len(FRONT) and speeds[0] <= tpf <= speeds[-1]
        above = f"{100 * (accuracy - float(np.interp(tpf, speeds, accuracies))):+.1f}" if known else ""
        table.add_row(name, f"{accuracy:.1%}", f"{tpf:.2f}", f"{rows:.1f}", above)
    return table


def main() -> None:
    """Measure what is missing, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="lists", help="lists, or a checkpoint folder")
    parser.add_argument("--problems", type=int, default=800)
    parser.add_argument("--seed", type=int, default=1, help="2 is the final test")
    parser.add_argument("--items", type=int, default=0, help="only lists of at least so many")
    parser.add_argument("--block-size", type=int, default=BASE["block_size"])
    parser.add_argument(
        "--only", choices=list(SETTINGS), action="append", help="one setting beside plain decoding; may be repeated"
    )
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 150)
    names = [name for name in SETTINGS if name in FRONT or not options.only or name in options.only]
    asked = options.problems, options.seed, options.block_size, options.items
    jobs = [Job(options.model, name, *asked) for name in names]
    for table in shown(run(jobs, options.processes, console)):
        console.print(table)


if __name__ == "__main__":
    main()
