"""Jobs of two ranks that are killed at random moments and go on: nothing may be lost, nothing misreported.

``python -m tests.system.kills FOLDER --runs 50`` makes so many jobs in FOLDER, each killed up to three times, one rank
or both, and compares texts and figures with those of a job that nobody disturbed.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from tests.jobs.test_resumed_figures import figures
from tests.system import forked
from tests.system.conftest import entries, results

RANKS, REQUESTS = 2, 12
LIMIT_S = 240.0
SETTINGS = [
    f"task.limit={REQUESTS}", f"parallel.data={RANKS}", "parallel.timeout_s=10", "engine.max_sequences=3",
    "decode.branches=2", "decode.drafts=4", "logging.progress=never", "job.crashes=null",
]  # fmt: skip


def start(folder: Path) -> forked.Ranks:
    """Start a job, or go on with it."""
    return forked.job(folder, RANKS, *SETTINGS)


def complete(folder: Path) -> None:
    """Let a job end."""
    job = start(folder)
    assert job.wait(LIMIT_S) == [0] * RANKS, job.printed()[-3000:]


def finished(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Result lines and figures without times."""
    return results(folder), figures(json.loads((folder / "report.json").read_text()))


def names(folder: Path) -> list[str]:
    """The requests in the journal, once for each time that they ran to their end; a kill may have cut a line."""
    lines = [line for part in folder.glob("journal/*.jsonl") for line in part.read_text().split("\n")]
    return [name for line in lines if line.endswith("}") and (name := json.loads(line).get("id"))]


def disturbed(folder: Path, dice: random.Random) -> int:
    """Kill a job some times, then let it end; returns how often it was killed."""
    kills = 0
    for _ in range(dice.randint(1, 3)):
        job, at = start(folder), entries(folder) + dice.randint(0, REQUESTS // 3)
        while entries(folder) < at and all(process.is_alive() for process in job.processes):
            time.sleep(0.005)
        time.sleep(dice.random() * 0.2)
        if dice.random() < 0.8:
            job.kill()
        else:  # the other ends by itself
            dice.choice(job.processes).kill()
        kills += any(job.wait(LIMIT_S))
    if not (folder / "report.json").exists():
        complete(folder)
    return kills


def main(arguments: list[str] | None = None) -> int:
    """Run all; print what differs, and how many were killed how often; returns how many differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    whole = options.folder / "undisturbed"
    complete(whole)
    lines, expected = finished(whole)
    dice, differ, kills = random.Random(options.seed), 0, 0
    for number in range(options.runs):
        folder = options.folder / str(number)
        kills += disturbed(folder, dice)
        found, figures_found = finished(folder)
        wrong = [name for name in expected if figures_found.get(name) != expected[name]]
        ended = names(folder)
        wrong += ["requests that ended twice, or never"] * (not len(ended) == len({*ended}) == REQUESTS)
        if found != lines or wrong:
            differ += 1
            print(f"{folder}: other {'texts ' if found != lines else ''}{wrong}", flush=True)
        else:
            shutil.rmtree(folder)
        if (number + 1) % 10 == 0 or number + 1 == options.runs:
            print(f"{number + 1} jobs, killed {kills} times, {differ} differ", flush=True)
    return differ


if __name__ == "__main__":
    sys.exit(main())
