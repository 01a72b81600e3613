"""Faults drawn by a seed: `python -m tests.system.random_faults --count 100 --seed 0`.

Each is a job of two ranks in which something happens to a rank or to its launcher at some stage (`planted.py`). The job
must end and say why. Then it goes on under another launcher and mesh, and its texts and figures must be those of an
undisturbed job. Launchers are torchrun, mpirun where there is an MPI, and srun on a throw-away Slurm cluster of two
nodes.

`--grid` has every fault once instead, in an order that the seed draws, which takes a night; `--from 120` goes on there.
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
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from tests.jobs.test_resumed_figures import figures
from tests.system import slurm
from tests.system.conftest import MARK, QUIET, ROOT, marked, results
from tests.system.planted import BEGINS

REQUESTS, TIMEOUT_S, LIMIT_S = 16, 6, 150
SETTINGS = [
    *QUIET, f"task.limit={REQUESTS}", "decode=embedded", "decode.branches=1", "engine.max_sequences=4", "job.grace_s=1"
]  # fmt: skip
STAGES = (
    "joining", "grouping", "reading", "loading", "compiling", "first step", "generating", "judging", "writing",
    "merging", "pages",
)  # fmt: skip
OF_RANK_0 = ("merging", "pages")
OF_LEADERS = ("judging", "writing")  # of replicas
OF_THE_RANKS = ("parallel", "world")  # in a report
WHATS = (  # how, to whom
    *((how, "itself") for how in ("SIGKILL", "SIGSTOP", "SIGTERM", "SIGUSR1", "raise")),
    *((how, "launcher") for how in ("SIGKILL", "SIGTERM", "SIGUSR1")),
    ("SIGKILL", "proxy"),
)
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

    def possible(self) -> bool:
        """Whether this rank comes to this stage, has such a launcher, and can say anything.

        A process that is stopped before all have joined is waited for, as one that starts slowly.
        """
        leads = self.rank == 0 or (self.mesh == "data" and self.stage not in OF_RANK_0)
        comes = leads or self.stage not in OF_LEADERS + OF_RANK_0
        there = self.whom != "proxy" or self.launcher == "mpirun"
        return comes and there and (self.how, self.stage) != ("SIGSTOP", "joining")


def grid(rng: random.Random, launchers: list[str]) -> list[Fault]:
    """Every fault once, in a random order, each with a random launcher that goes on."""
    found = []
    for stage, rank, (how, whom), launcher, mesh in product(STAGES, range(2), WHATS, launchers, ("data", "branch")):
        again = rng.choice([other for other in [*launchers, "python"] if other != launcher])
        fault = Fault(stage, rank, how, whom, launcher, mesh, again)
        if fault.possible():
            found.append(fault)
    rng.shuffle(found)
    return found


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
    """A job of two ranks, or of one process."""
    command = {
        "python": [sys.executable],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"],
        "mpirun": [str(MPIRUN), "-n", "2", sys.executable],
        # ranks are not its children, so they are told its process
        "srun": ["sh", "-c", 'SRUN=$$ exec srun "$@"', "sh", "--nodes=2", "--ntasks-per-node=1", "--overcommit",
                 "--kill-on-bad-exit=1", sys.executable],
    }  # fmt: skip
    ranks = [] if launcher == "python" else [f"parallel.{mesh}=2", f"parallel.timeout_s={TIMEOUT_S}"]
    overrides = [f"hydra.run.dir={folder}", *SETTINGS, *ranks, *more]
    return subprocess.Popen(
        [*command[launcher], *module, *overrides], env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
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
    kill(job.pid, *of_jobs())


def kill(*processes: int) -> None:
    """End processes, of which some may have ended."""
    for process in processes:
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
    report = json.loads((folder / "report.json").read_text())
    return results(folder), {name: value for name, value in figures(report).items() if name not in OF_THE_RANKS}


def disturb(fault: Fault, folder: Path) -> None:
    """Run a job with a fault, and look at how it ends.

    Raises:
        AssertionError: nothing named the cause, or a process of the job still runs.
    """
    module = ["-m", "tests.system.planted", fault.stage, str(fault.rank), fault.how, fault.whom]
    job = start(fault.launcher, module, folder, fault.mesh)
    lost = f"rank {fault.rank} of 2 does not answer"
    if fault.how == "SIGSTOP":
        printed = until_it_says(job, lost)
        assert lost in printed, printed[-3000:]
    else:
        printed = finished(job)
        complete = (job.returncode == 0 and fault.stage in OF_RANK_0) or (folder / "report.html").exists()
        words = said(fault)
        assert BEGINS in printed or not words, printed[-3000:]
        assert complete or not words or any(word in printed for word in words), printed[-3000:]
    left = until_gone()
    assert not left, f"still running: {left}"


def said(fault: Fault) -> list[str]:
    """What a job may say at its end, if it cannot complete; none where whoever would pass it on was killed."""
    if fault.how == "raise":
        return ["planted fault"]
    if fault.whom == "itself" and fault.how == "SIGKILL":
        own = {  # MPICH's mpirun ends all ranks at once, and does not say which was killed
            "torchrun": "Signal 9 (SIGKILL)", "mpirun": "(signal 9)", "srun": f"task {fault.rank}: Killed"
        }  # fmt: skip
        return [f"rank {fault.rank} of 2 does not answer", own[fault.launcher]]
    at_once = fault.how == "SIGKILL" or (fault.launcher, fault.how) == ("torchrun", "SIGUSR1")
    if fault.whom != "itself" and at_once:
        return []
    own_words = fault.launcher == "srun" and fault.whom == "launcher"  # it ends its ranks at once at a SIGTERM
    return ["stopped by SIG", *(["forcing job termination"] if own_words else [])]


def go_on(fault: Fault, folder: Path) -> None:
    """Have another launcher and mesh go on with a job."""
    again = start(fault.again, ["-m", "lopa_dist"], folder, "data" if fault.mesh == "branch" else "branch")
    printed = finished(again)
    assert again.returncode == 0, printed[-3000:]


def main() -> None:
    """All of them, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, help="how many faults; without it, 10 or the whole grid")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--grid", action="store_true", help="every fault once")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the number of the fault to begin with")
    options = parser.parse_args()
    os.environ.setdefault(MARK, str(os.getpid()))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # and with it the cluster
    rng, bad = random.Random(options.seed), 0
    with contextlib.ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory())
        here = stack.enter_context(launchers(Path(name) / "slurm"))
        stack.callback(lambda: kill(*of_jobs()))
        folder = Path(name)
        printed = finished(start("python", ["-m", "lopa_dist"], folder / "undisturbed", ""))
        assert (folder / "undisturbed" / "report.json").exists(), printed
        every = grid(rng, here)
        if not options.grid:
            every = [rng.choice(every) for _ in range(options.first + (options.count or 10))]
        chosen = every[options.first :][: options.count]
        sys.stdout.write(f"faults {options.first} to {options.first + len(chosen) - 1} of {len(every)}\n")
        for number, fault in enumerate(chosen, options.first):
            began = time.monotonic()
            try:
                disturb(fault, folder / str(number))
                go_on(fault, folder / str(number))
                assert outcome(folder / str(number)) == outcome(folder / "undisturbed")
                result = "survived"
            except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
                bad += 1
                result = f"FAILED: {error}"
            kill(*of_jobs())  # the next fault would take them for its own
            seconds = time.monotonic() - began
            sys.stdout.write(f"{number} {', '.join(map(str, astuple(fault)))}: {seconds:.0f} s, {result}\n")
            sys.stdout.flush()
    sys.exit(f"{bad} of {len(chosen)} failed" if bad else None)


if __name__ == "__main__":
    main()
