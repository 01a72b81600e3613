"""A rank that dies, hangs or raises ends the job everywhere, soon, with its name."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system import forked

pytestmark = [pytest.mark.system, pytest.mark.timeout(200)]
TIMEOUT_S = 10  # a busy machine may take more than half of it for a step


def overrides(folder: Path, mesh: dict[str, int]) -> list[str]:
    return [
        "task.limit=60",
        f"hydra.run.dir={folder}",
        "logging.wandb.mode=disabled",
        "parallel.threads=1",
        *(f"parallel.{axis}={size}" for axis, size in mesh.items()),
        f"parallel.timeout_s={TIMEOUT_S}",
        "decode.branches=3",
    ]


def start(folder: Path, launcher: str, fault: list[str], mesh: dict[str, int]) -> subprocess.Popen[str]:
    """A job of two ranks."""
    module = ["-m", "tests.system.faulty", *fault, *overrides(folder, mesh)]
    if launcher == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *module]
    else:
        mpirun = Path(sys.executable).parent / "mpirun"
        command = [str(mpirun if mpirun.exists() else "mpirun"), "-n", "2", sys.executable, *module]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
        start_new_session=True,
    )


def read_until(process: subprocess.Popen[str], word: str) -> tuple[str, float]:
    """Everything printed until `word` shows, and the seconds since the fault; without a fault, minus infinity."""
    assert process.stdout is not None
    printed, began = "", float("inf")
    for line in process.stdout:
        printed += line
        if "the fault begins" in line:
            began = time.monotonic()
        if word in line:
            return printed, time.monotonic() - began
    return printed, float("inf")


@contextlib.contextmanager
def watched(
    folder: Path, launcher: str, fault: list[str], mesh: dict[str, int], word: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A job with a fault, and what it printed up to `word`, which has to come in time."""
    process = start(folder, launcher, fault, mesh)
    try:
        printed, seconds = read_until(process, word)
        assert word in printed, printed[-3000:]
        assert "the fault begins" in printed
        assert seconds < TIMEOUT_S + 10
        yield process, printed
    finally:
        end(process, folder)


def end(process: subprocess.Popen[str], folder: Path) -> None:
    """Leave no process behind, whatever state the job is in."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    subprocess.run(["pkill", "-KILL", "-f", f"hydra.run.dir={folder}"], check=False)


def test_torchrun_names_the_lost_rank(tmp_path: Path) -> None:
    with watched(tmp_path, "torchrun", ["1", "4", "raise"], {"data": 2}, "lopa-dist: rank 1") as (process, printed):
        assert "MemoryError: planted fault" in printed
        assert process.wait(60) != 0


def until_it_says(ranks: forked.Ranks, word: str) -> str:
    """What ranks have printed when `word` shows, which has to come in time after the fault."""
    end = time.monotonic() + 100
    while "the fault begins" not in ranks.printed() and ranks.running() and time.monotonic() < end:
        time.sleep(0.02)
    began = time.monotonic()
    while word not in ranks.printed() and time.monotonic() < began + TIMEOUT_S + 10:
        time.sleep(0.02)
    printed = ranks.printed()
    assert "the fault begins" in printed, printed[-3000:]
    assert word in printed, printed[-3000:]
    return printed


def forked_job(folder: Path, count: int, fault: list[str], mesh: dict[str, int]) -> forked.Ranks:
    return forked.start("tests.system.faulty", count, *fault, *overrides(folder, mesh), log=folder.parent / "log")


def test_a_rank_that_is_killed_is_named(tmp_path: Path) -> None:
    """By the rank that waits for its records; `test_resume.py` has torchrun start such ranks again."""
    ranks = forked_job(tmp_path / "run", 2, ["1", "4", "kill"], {"branch": 2})
    until_it_says(ranks, "lopa-dist: rank 1")
    assert all(ranks.wait(60)), ranks.printed()[-3000:]


def test_groups_that_are_a_part_of_the_job_know_its_timeout(tmp_path: Path) -> None:
    """Branch 2 x tensor 2: the rank that hangs is in two groups, its neighbours wait in one each."""
    ranks = forked_job(tmp_path / "run", 4, ["3", "4", "stop"], {"branch": 2, "tensor": 2})
    try:
        until_it_says(ranks, "rank 3 of 4 does not answer")
    finally:
        ranks.kill()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("stop", "rank 1 of 2 does not answer"),
        ("hang", "rank 1 of 2 is still at an earlier step: busy or hanging, though alive"),
        ("raise", "rank 1: MemoryError: planted fault"),
    ],
)
def test_a_collective_that_never_raises_names_the_lost_rank_and_keeps_what_was_done(
    tmp_path: Path, how: str, said: str
) -> None:
    """As NCCL's, which returns at once, while the copy to the host after it never comes."""
    folder, mesh = tmp_path / "run", {"branch": 2}
    ranks = forked_job(folder, 2, ["1", "30", f"late-{how}"], mesh)
    try:
        until_it_says(ranks, said)
    finally:
        ranks.kill()
    [part] = (folder / "journal").glob("001-*.jsonl")
    kept = [json.loads(line)["id"] for line in part.read_text().splitlines()]
    assert kept
    if how != "stop":  # what is kept is the same, so that one job that goes on is enough
        return
    ranks = forked_job(folder, 2, ["1", "0", "none"], mesh)
    assert ranks.wait() == [0, 0], ranks.printed()[-3000:]
    assert f"{len(kept)} of them were done before (attempt 2)" in ranks.printed()
    assert "60 requests: " in ranks.printed()
    report = json.loads((folder / "report.json").read_text())
    assert (report["attempts"], report["requests"]) == (2, 60)


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs mpi4py: pip install 'lopa_dist[mpi]'")
@pytest.mark.parametrize("how", ["stop", "raise"])
def test_mpirun_names_the_lost_rank(tmp_path: Path, how: str) -> None:
    with watched(tmp_path, "mpirun", ["1", "4", how], {"branch": 2}, "lopa-dist: rank 1"):
        pass


NOT_JOINED = """
import atexit, time
from lopa_dist.jobs.run import job
from lopa_dist.parallel.launcher import LaunchError
def run(*_):
    raise LaunchError("rank 0 could not join the others")
job.run = run
atexit.register(time.sleep, 100)  # as MPI's end, which waits for all ranks
from lopa_dist.__main__ import main
main()
"""


def test_a_rank_that_cannot_be_joined_leaves_at_once(tmp_path: Path) -> None:
    ranks = {"PMI_SIZE": "2", "PMI_RANK": "0", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", NOT_JOINED, f"hydra.run.dir={tmp_path}"], env={**os.environ, **ranks}, timeout=60,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "lopa-dist: rank 0 could not join the others")
