"""Two jobs of several ranks in one folder: the second is refused while the first runs, and nothing is mixed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from lopa_dist.config import composed
from lopa_dist.jobs.run.job import run
from lopa_dist.parallel.launcher import World
from tests.system.random_faults import MPIRUN, SETTINGS, finished, of_jobs, outcome, start

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not MPIRUN.exists(), reason="needs an MPI in this environment: pip install mpi4py mpich"),
]


def test_the_second_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    """The second has another launcher and mesh, and would set aside what the first one has done."""
    planted = ["-m", "tests.system.planted", "generating", "1", "SIGSTOP", "itself"]
    first = start("torchrun", planted, tmp_path / "shared", "data", "parallel.timeout_s=120")
    end = time.monotonic() + 120
    while not list((tmp_path / "shared").glob("journal/001-1.jsonl")) and time.monotonic() < end:
        time.sleep(0.1)
    second = start("mpirun", ["-m", "lopa_dist"], tmp_path / "shared", "branch", "job.resume=new")
    printed = finished(second)
    assert second.returncode != 0
    assert "another job is at work in it (process" in printed, printed[-3000:]
    assert not list(tmp_path.glob("shared/journal.old*"))
    for process in of_jobs():
        os.kill(process, signal.SIGCONT)
    finished(first)
    assert first.returncode == 0
    run(composed(SETTINGS), tmp_path / "alone", World("python"))
    assert outcome(tmp_path / "shared") == outcome(tmp_path / "alone")
