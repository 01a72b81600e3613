"""Jobs of two ranks that are killed at random moments and go on: nothing may be lost, nothing misreported.

``python -m tests.system.kills FOLDER --runs 50`` makes so many jobs in FOLDER, each killed up to three times, one rank
or both, and compares texts and figures with those of a job that nobody disturbed. The ranks are forked from this
process, as what torchrun starts, so that most of the time goes into jobs and not into imports.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from lopa_dist.config import composed
from lopa_dist.jobs.run.job import run
from lopa_dist.parallel.launcher import detect
from tests.jobs.test_resumed_figures import figures
from tests.system.conftest import entries, results

RANKS, REQUESTS = 2, 24
WHETHER = os.WEXITED | os.WNOHANG | os.WNOWAIT  # a process has ended, without reaping it
LIMIT_S = 240.0
SETTINGS = [
    f"task.limit={REQUESTS}", f"parallel.data={RANKS}", "parallel.threads=1", "parallel.timeout_s=10",
    "engine.max_sequences=3", "decode.branches=2", "decode.drafts=4", "logging.wandb.mode=disabled",
    "logging.progress=never", "job.crashes=null",
]  # fmt: skip


def start(folder: Path) -> list[int]:
    """Fork the ranks of a job; returns their processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = []
    for rank in range(RANKS):
        process = os.fork()
        if process == 0:
            status = 1
            try:
                os.environ |= {
                    "TORCHELASTIC_RUN_ID": "kills", "RANK": str(rank), "WORLD_SIZE": str(RANKS),
                    "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                }  # fmt: skip
                with (folder / f"rank{rank}.log").open("a") as log:
                    os.dup2(log.fileno(), 1)
                    os.dup2(log.fileno(), 2)
                run(composed(SETTINGS), folder, detect())
                status = 0
            finally:
                sys.stderr.flush()
                os._exit(status)
        found.append(process)
    return found


def ended(processes: list[int]) -> list[int]:
    """The exit codes of a job's ranks, when all have ended; those that take too long are killed."""
    until, codes = time.monotonic() + LIMIT_S, {}
    while len(codes) < len(processes):
        for process in {*processes} - {*codes}:
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                codes[process] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            kill(processes)
        time.sleep(0.01)
    return [codes[process] for process in processes]


def kill(processes: list[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def finished(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Result lines and figures without times."""
    return results(folder), figures(json.loads((folder / "report.json").read_text()))


def disturbed(folder: Path, dice: random.Random) -> int:
    """Kill a job some times, then let it end; returns how often it was killed."""
    kills = 0
    for _ in range(dice.randint(1, 3)):
        processes, at = start(folder), entries(folder) + dice.randint(0, 8)
        alive = True
        while entries(folder) < at and alive:
            time.sleep(0.005)
            alive = all(os.waitid(os.P_PID, process, WHETHER) is None for process in processes)
        time.sleep(dice.random() * 0.2)
        kill(processes if dice.random() < 0.8 else [dice.choice(processes)])
        kills += any(ended(processes))
    if not (folder / "report.json").exists():
        codes = ended(start(folder))
        assert codes == [0] * RANKS, (folder / "rank0.log").read_text()[-3000:]
    return kills


def main(arguments: list[str] | None = None) -> int:
    """Run all; print what differs, and how many were killed how often; returns how many differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    whole = options.folder / "undisturbed"
    whole.mkdir(parents=True)
    assert ended(start(whole)) == [0] * RANKS, (whole / "rank0.log").read_text()[-3000:]
    lines, expected = finished(whole)
    dice, differ, kills = random.Random(options.seed), 0, 0
    for number in range(options.runs):
        folder = options.folder / str(number)
        folder.mkdir()
        kills += disturbed(folder, dice)
        found, figures_found = finished(folder)
        wrong = [name for name in expected if figures_found.get(name) != expected[name]]
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
