"""Jobs survive faults drawn at random. `LOPA_FAULTS=100` draws as many; random_faults.py has all.

The first is of srun, the second of mpirun, where these are here; `test_faults.py` has one of torchrun.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from lopa_dist.composing import composed
from lopa_dist.jobs.run.job import run
from lopa_dist.parallel.launcher import World
from tests.system.random_faults import SETTINGS, disturb, finished, grid, launchers, outcome, start, until_gone

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of one process, to which nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run(composed(SETTINGS), folder, World("python"))
    return folder


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    with launchers(tmp_path_factory.mktemp("slurm") / "cluster") as found:
        yield found


@pytest.mark.parametrize(
    ("launcher", "fault", "said"),
    [
        ("torchrun", ["joining", "0", "SIGKILL", "launcher"], "does not answer"),  # its agent keeps the store
        # MPI waits for ever
        ("mpirun", ["joining", "1", "raise", "itself"], "rank 1 of 2 ended before all had joined"),
        # rank 0 waits in MPI, or may still compare settings
        (
            "mpirun",
            ["grouping", "1", "raise", "itself"],
            "lopa-dist: (rank 0 could not join the others: )?rank 1: MemoryError: planted fault",
        ),
    ],
)
def test_a_rank_that_waits_in_vain_to_join_ends(
    tmp_path: Path, here: list[str], launcher: str, fault: list[str], said: str
) -> None:
    if launcher not in here:
        pytest.skip("needs an MPI in this environment: pip install mpi4py mpich")
    job = start(launcher, ["-m", "tests.system.planted", *fault], tmp_path, "data")
    printed = finished(job)
    assert re.search(said, printed), printed[-3000:]
    assert job.returncode != 0
    assert not until_gone()


@pytest.mark.parametrize("seed", range(2, 2 + int(os.environ.get("LOPA_FAULTS", "2"))))
def test_nothing_is_lost_and_the_cause_is_named(tmp_path: Path, undisturbed: Path, here: list[str], seed: int) -> None:
    """The job that goes on is one process, this one: `test_resume.py` has other launchers go on."""
    disturb(random.Random(seed).choice(grid(random.Random(0), here)), tmp_path / "run")
    run(composed(SETTINGS), tmp_path / "run", World("python"))
    assert outcome(tmp_path / "run") == outcome(undisturbed)
