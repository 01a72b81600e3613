"""The launcher is read from its environment; the ranks of a job meet through a store."""

from __future__ import annotations

import atexit
import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from lopa_dist.parallel.launcher import LaunchError, Start, World, detect, into_log, mpi


def test_a_restart_is_distinguished_from_a_start() -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    first = Start.read(job)
    assert not Start.read(job).again(first)
    assert not Start.read({"SLURM_JOB_ID": "8", "SLURM_STEP_ID": "0", "SLURM_RESTART_COUNT": "1"}).again(first)
    assert Start.read(job | {"SLURM_RESTART_COUNT": "1"}).again(first)
    assert not Start.read({}).again(Start.read({}))
    worker = Start.read({"TORCHELASTIC_RUN_ID": "none"})
    assert worker.again(Start.read({"TORCHELASTIC_RUN_ID": "none"})), "both are children of this process's parent"


def test_torchrun() -> None:
    names = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    inside_slurm = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    assert detect({"TORCHELASTIC_RUN_ID": "x", **names, **inside_slurm}) == World("torchrun", 3, 4, 1, 2)


def test_an_mpi_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Without(ModuleType):
        rc = SimpleNamespace()

        def __getattr__(self, name: str) -> None:
            raise RuntimeError("cannot load MPI library\nlibmpi.so: no such file\nlibmpi.so.12: no such file")

    monkeypatch.setitem(sys.modules, "mpi4py", Without("mpi4py"))
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    with pytest.raises(LaunchError, match=r"finds no MPI \(cannot load MPI library\): load the module"):
        mpi()


OPEN_MPI, MPICH = {"OMPI_COMM_WORLD_SIZE": "2", "MPI_LOCALNRANKS": "2"}, {"MPI_LOCALNRANKS": "2"}


@pytest.mark.parametrize(
    ("environment", "library", "named"),
    [
        (OPEN_MPI, "MPICH Version:      5.0.2\nMore", r"Open MPI's mpirun .* uses MPICH Version: 5\.0\.2: take"),
        (OPEN_MPI, "Open MPI v5.0.11, package: Open MPI", ""),
        (
            MPICH,
            "Open MPI v4.1.8, package: Open MPI",
            r"MPICH's or Intel's mpirun .* uses Open MPI v4\.1\.8: take",
        ),
        (MPICH, "MPICH Version:      5.0.2", ""),
        (MPICH, "Intel(R) MPI Library 2021.13 for Linux* OS", ""),
        ({}, "Open MPI v5.0.11", ""),
    ],
)
def test_the_mpirun_of_another_mpi_is_named_before_mpi_starts(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], library: str, named: str
) -> None:
    begun, ended = [], list[object]()
    monkeypatch.setattr(atexit, "register", lambda _, library: ended.append(library))
    fake = ModuleType("mpi4py")
    fake.rc = SimpleNamespace()  # type: ignore[attr-defined]
    fake.MPI = SimpleNamespace(  # type: ignore[attr-defined]
        Is_initialized=lambda: bool(begun), Get_library_version=lambda: library, Init_thread=lambda: begun.append(1)
    )
    monkeypatch.setitem(sys.modules, "mpi4py", fake)
    if named:
        with pytest.raises(LaunchError, match=named):
            mpi(environment)
        assert not begun
        return
    assert mpi(environment) is mpi(environment) is fake.MPI
    assert begun == [1]
    assert not fake.rc.initialize
    assert ended == [fake.MPI]


def test_mpirun_and_srun() -> None:
    open_mpi = {
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_RANK": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }
    assert detect(open_mpi) == World("mpirun", 2, 4, 0, 2)
    assert detect({"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2"}) == World("mpirun", 1, 2, 1, 2)
    slurm = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_GTIDS": "2,3"}
    assert detect(slurm) == World("srun", 3, 4, 1, 2)
    assert detect({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) == World("python")


def test_a_log_says_why_its_job_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And only the log: standard error has the same words already."""
    handler = logging.FileHandler(tmp_path / "cli.log")
    logging.getLogger().addHandler(handler)
    try:
        into_log("stopped by SIGTERM; the results so far are kept; 100 %s")
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()
    assert (tmp_path / "cli.log").read_text() == "stopped by SIGTERM; the results so far are kept; 100 %s\n"
    assert capsys.readouterr() == ("", "")
