"""Jobs survive faults drawn at random. `LOPA_FAULTS=100` draws as many; tests/system/random_faults.py shows them."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.conftest import alone
from tests.system.random_faults import REQUESTS, Fault, launchers, survive

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of one process, to which nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed")
    alone(folder, f"task.limit={REQUESTS}", "decode=embedded", "decode.branches=1", "engine.max_sequences=4")
    return folder


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    with launchers(tmp_path_factory.mktemp("slurm") / "cluster") as found:
        yield found


@pytest.mark.parametrize(
    "fault",
    [
        Fault("joining", 0, "SIGKILL", "launcher", "torchrun", "branch", "mpirun"),  # its agent keeps the store
        Fault("joining", 1, "raise", "itself", "mpirun", "data", "torchrun"),  # MPI waits for ever
    ],
    ids=["torchrun", "mpirun"],
)
def test_a_rank_that_waits_in_vain_to_join_ends(
    tmp_path: Path, undisturbed: Path, here: list[str], fault: Fault
) -> None:
    if "mpirun" not in here:
        pytest.skip("needs an MPI in this environment: pip install mpi4py mpich")
    survive(fault, tmp_path / "run", undisturbed)


@pytest.mark.parametrize("seed", range(int(os.environ.get("LOPA_FAULTS", "2"))))
def test_nothing_is_lost_and_the_cause_is_named(tmp_path: Path, undisturbed: Path, here: list[str], seed: int) -> None:
    survive(Fault.drawn(random.Random(seed), here), tmp_path / "run", undisturbed)
