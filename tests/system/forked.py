"""Ranks forked from a process that has imported the package: real processes, without the seconds that imports take.

They get the variables that torchrun would set. Tests of launchers start them for real.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path

from hydra._internal.hydra import Hydra

from lopa_dist.parallel import launcher
from tests.ports import free_port

FORKING = multiprocessing.get_context("forkserver")
IMPORTS = [
    "lopa_dist.cli", "lopa_dist.jobs.run.job", "lopa_dist.llm", "lopa_dist.parallel.group", "matplotlib.figure",
]  # fmt: skip


@dataclass
class Ranks:
    """The ranks of a job, and the file that has what they print."""

    processes: list[BaseProcess]
    log: Path

    def printed(self) -> str:
        """What they have printed so far."""
        return self.log.read_text()

    def running(self) -> bool:
        """Whether any of them runs."""
        return any(process.is_alive() for process in self.processes)

    def wait(self, seconds: float = 300.0) -> list[int | None]:
        """Their exit statuses when all have ended; those that take too long are killed."""
        end = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(end - time.monotonic(), 0.0))
        self.kill()
        return [process.exitcode for process in self.processes]

    def kill(self) -> None:
        """End those that still run, also those that are stopped."""
        for process in self.processes:
            process.kill()
            process.join()


def perform(program: str, arguments: Sequence[str], variables: dict[str, str], folder: Path, log: Path) -> None:
    """Run a module, or a file that ends in `.py`, as a rank."""
    with log.open("a") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.environ.update(variables)
    os.chdir(folder)
    launcher.start_ticks = lambda process: None  # all jobs have one parent; none is a restart of another
    Hydra.get_mode = lambda *_, **__: None  # it composes the configuration a second time to see that there is no sweep
    sys.argv = [program, *arguments]
    try:
        if program.endswith(".py"):
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def start(program: str, count: int, *arguments: str, log: Path) -> Ranks:
    """Start `count` ranks of a program with arguments, in the current folder."""
    common = {
        "TORCHELASTIC_RUN_ID": "forked", "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    log.touch()
    FORKING.set_forkserver_preload(IMPORTS)
    processes: list[BaseProcess] = []
    for rank in range(count):
        variables = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        given = (program, arguments, variables, Path.cwd(), log)
        processes.append(FORKING.Process(target=perform, args=given))
        processes[-1].start()
    return Ranks(processes, log)


def job(folder: Path, count: int, *overrides: str) -> Ranks:
    """Start the ranks of the main job, with its run folder; what they print goes into a file beside it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    always = (f"hydra.run.dir={folder}", "logging.wandb.mode=disabled", "parallel.threads=1", *overrides)
    return start("lopa_dist", count, *always, log=folder.parent / f"{folder.name}.log")


def stop() -> None:
    """End the process that ranks are forked from, if there is one."""
    server = forkserver._forkserver  # type: ignore[attr-defined]
    if server._forkserver_pid is not None:
        os.kill(server._forkserver_pid, signal.SIGKILL)  # it would wait for whoever has inherited its pipe
    server._stop()


def helper() -> int | None:
    """The process that Python starts beside it, which ends with this one."""
    return resource_tracker._resource_tracker._pid  # type: ignore[attr-defined, no-any-return]
