"""Faults drawn by a seed: `python -m tests.system.random_faults --count 100 --seed 0`.

Each is a job of two ranks in which something happens to a rank or to its launcher at some stage. The job must end and
say why. Then it goes on under another launcher and mesh, and its texts and figures must be those of an undisturbed job.
Launchers are torchrun, mpirun where there is an MPI, and srun on a throw-away Slurm cluster of two nodes.

`python -m tests.system.random_faults run STAGE RANK HOW WHOM [overrides]` is such a job. At STAGE, RANK does HOW (a
signal's name, or raise) to WHOM: itself, or its launcher.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from tests.jobs.test_resumed_figures import figures
from tests.system import slurm
from tests.system.conftest import MARK, QUIET, ROOT, marked

REQUESTS, TIMEOUT_S, LIMIT_S = 16, 6, 150
STAGES = ("joining", "reading", "loading", "first step", "generating", "writing", "merging", "pages")
BEGINS = "the fault begins"
OF_RANK_0 = ("merging", "pages")
OF_THE_RANKS = ("world",)  # in a report
MPIRUN = Path(sys.executable).parent / "mpirun"


@dataclass(frozen=True)
class Fault:
    """What happens where."""

    stage: str
    rank: int
    how: str
    whom: str
    launcher: str
    mesh: str
    again: str  # the launcher of the job that goes on

    @classmethod
    def drawn(cls, rng: random.Random, launchers: list[str]) -> Fault:
        """One that says anything: a process that is stopped before all have joined is waited for."""
        while True:
            stage = rng.choice(STAGES)
            mesh = rng.choice(["data", "branch"])
            of_rank_0 = stage in OF_RANK_0 or (stage == "writing" and mesh == "branch")  # only leaders write
            rank = 0 if of_rank_0 else rng.randrange(2)
            how = rng.choice(["SIGKILL", "SIGSTOP", "SIGTERM", "SIGUSR1", "raise"])
            whom = rng.choice(["itself", "launcher"]) if how in ("SIGKILL", "SIGTERM") else "itself"
            if not (how == "SIGSTOP" and stage == "joining"):
                launcher = rng.choice(launchers)
                again = rng.choice([other for other in launchers if other != launcher] or [launcher])
                return cls(stage, rank, how, whom, launcher, mesh, again)


@contextlib.contextmanager
def launchers(folder: Path) -> Iterator[list[str]]:
    """Those that are here; while they are in use, what Slurm needs is in the environment and in `folder`."""
    found = ["torchrun", *(["mpirun"] if MPIRUN.exists() else []), *(["srun"] if slurm.POSSIBLE else [])]
    before = {**os.environ}
    with slurm.cluster(folder) if slurm.POSSIBLE else contextlib.nullcontext(before) as environment:
        os.environ.update(environment)
        try:
            yield found
        finally:
            os.environ.clear()
            os.environ.update(before)


def start(launcher: str, module: list[str], folder: Path, mesh: str, *more: str) -> subprocess.Popen[str]:
    """A job of two ranks."""
    two = {
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"],
        "mpirun": [str(MPIRUN), "-n", "2", sys.executable],
        # ranks are not its children, so they are told its process
        "srun": ["sh", "-c", 'SRUN=$$ exec srun "$@"', "sh", "--nodes=2", "--ntasks-per-node=1", "--overcommit",
                 "--kill-on-bad-exit=1", sys.executable],
    }  # fmt: skip
    overrides = [
        *QUIET, f"hydra.run.dir={folder}", f"task.limit={REQUESTS}", "decode=embedded", "decode.branches=1",
        "engine.max_sequences=4", f"parallel.{mesh}=2", f"parallel.timeout_s={TIMEOUT_S}", "job.grace_s=1", *more,
    ]  # fmt: skip
    return subprocess.Popen(
        [*two[launcher], *module, *overrides], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
        start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def finished(job: subprocess.Popen[str]) -> str:
    """What a job printed until it ended; one that does not end is an error."""
    try:
        return job.communicate(timeout=LIMIT_S)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)


def until_it_says(job: subprocess.Popen[str], word: str) -> str:
    """What a job printed up to `word`; then it is ended. A launcher waits long for a rank that is stopped."""
    assert job.stdout is not None
    printed = ""
    limit = threading.Timer(LIMIT_S, end, [job])
    limit.start()
    for line in job.stdout:
        printed += line
        if word in line:
            break
    limit.cancel()
    end(job)
    job.communicate()
    return printed


def end(job: subprocess.Popen[str]) -> None:
    """End a job, whatever state it is in."""
    for process in [job.pid, *of_jobs()]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def until_gone(limit_s: float = 20.0) -> dict[int, str]:
    """Wait until no process of a job runs any more; returns those that do. Slurm's own are none of a job's."""
    end = time.monotonic() + limit_s
    while (left := of_jobs()) and time.monotonic() < end:
        time.sleep(0.1)
    return left


def of_jobs() -> dict[int, str]:
    """The processes of jobs that run, and their command lines."""
    found = marked(f"{MARK}={os.environ[MARK]}".encode())
    return {number: line for number, line in found.items() if "hydra.run.dir=" in line}


def outcome(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Result lines without what depends on time, and figures."""
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    for line in lines:
        del line["latency_s"]
    report = json.loads((folder / "report.json").read_text())
    return lines, {name: value for name, value in figures(report).items() if name not in OF_THE_RANKS}


def survive(fault: Fault, folder: Path, undisturbed: Path) -> None:
    """Run a job with a fault, look at how it ends, and go on with it.

    Raises:
        AssertionError: nothing named the cause, or the results are not those of the job in `undisturbed`.
    """
    module = ["-m", "tests.system.random_faults", "run", fault.stage, str(fault.rank), fault.how, fault.whom]
    job = start(fault.launcher, module, folder, fault.mesh)
    said = f"rank {fault.rank} of 2 does not answer"
    if fault.how == "SIGSTOP":
        assert said in (printed := until_it_says(job, said)), printed[-3000:]
    else:
        printed = finished(job)
        assert BEGINS in printed or (fault.how, fault.whom) == ("SIGKILL", "launcher"), printed[-3000:]
        complete = (job.returncode == 0 and fault.stage in OF_RANK_0) or (folder / "report.html").exists()
        if fault.how == "raise":
            assert "planted fault" in printed, printed[-3000:]
        elif fault.how == "SIGKILL" and fault.whom == "itself":
            own = {  # MPICH's mpirun ends all ranks at once, and does not say which was killed
                "torchrun": "Signal 9 (SIGKILL)", "mpirun": "(signal 9)", "srun": f"task {fault.rank}: Killed"
            }  # fmt: skip
            assert said in printed or own[fault.launcher] in printed, printed[-3000:]
        elif fault.how != "SIGKILL":  # srun ends its ranks at once when it gets a SIGTERM itself
            own_words = fault.launcher == "srun" and fault.whom == "launcher" and "forcing job termination" in printed
            assert complete or own_words or "stopped by SIG" in printed, printed[-3000:]
    left = until_gone()
    assert not left, f"still running: {left}"
    again = start(fault.again, ["-m", "lopa_dist"], folder, "data" if fault.mesh == "branch" else "branch")
    printed = finished(again)
    assert again.returncode == 0, printed[-3000:]
    assert outcome(folder) == outcome(undisturbed)


def planted(stage: str, rank: int, how: str, whom: str) -> None:
    """Have the fault happen in this process, if it is `rank`, when it comes to `stage`."""
    from lopa_dist.engine.runner import Runner
    from lopa_dist.jobs.run import job as run
    from lopa_dist.parallel.launcher import detect

    if detect().rank != rank:
        return
    place: dict[str, tuple[Any, str, int]] = {  # what is called, and the how manieth call it is
        "joining": (run, "Group", 1), "reading": (run, "JobInput", 1), "loading": (run.EngineBuilder, "load", 1),
        "first step": (Runner, "forward", 1), "generating": (Runner, "forward", 12),
        "writing": (run.Job, "write_verdicts", 8), "merging": (run, "merge", 1), "pages": (run.Job, "write_page", 1),
    }  # fmt: skip
    where, name, number = place[stage]
    real: Callable[..., Any] = getattr(where, name)
    calls = 0

    def faulty(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            os.write(2, f"{BEGINS}\n".encode())
            if how == "raise":
                raise MemoryError("planted fault")
            launcher = int(os.environ.get("SRUN", os.getppid()))
            os.kill(os.getpid() if whom == "itself" else launcher, signal.Signals[how])
            time.sleep(0.5)
        return real(*arguments, **named)

    setattr(where, name, faulty)


def main() -> None:
    """All of them, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ.setdefault(MARK, str(os.getpid()))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # and with it the cluster
    rng, bad = random.Random(options.seed), 0
    with tempfile.TemporaryDirectory() as name, launchers(Path(name) / "slurm") as here:
        folder = Path(name)
        printed = finished(start("torchrun", ["-m", "lopa_dist"], folder / "undisturbed", "data"))
        assert (folder / "undisturbed" / "report.json").exists(), printed
        for number in range(options.count):
            fault, began = Fault.drawn(rng, here), time.monotonic()
            try:
                survive(fault, folder / str(number), folder / "undisturbed")
                result = "survived"
            except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
                bad += 1
                result = f"FAILED: {error}"
            seconds = time.monotonic() - began
            sys.stdout.write(f"{number} {', '.join(map(str, astuple(fault)))}: {seconds:.0f} s, {result}\n")
            sys.stdout.flush()
    sys.exit(f"{bad} of {options.count} failed" if bad else None)


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        from lopa_dist.__main__ import main as command_line

        planted(sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5])
        sys.argv[1:6] = []
        command_line()
    else:
        main()
