"""How many threads a rank takes: as many as it was told to, wherever it was told."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lopa_dist.config import Config, ParallelConfig
from lopa_dist.jobs.setup import device, usable_cores
from lopa_dist.jobs.setup.device import Threads, choose_device, cores, threads
from lopa_dist.parallel.launcher import World


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("asked", "torch_has", "ranks", "slurm", "found"),
    [
        (0, 8, 1, "", (8, "the cores of this machine")),
        (0, 8, 2, "", (4, "the share of a rank in 8 cores")),
        (0, 8, 20, "", (1, "the share of a rank in 8 cores")),
        (0, 8, 1, "2", (2, "Slurm's --cpus-per-task")),
        (0, 8, 4, "6", (2, "the share of a rank in 8 cores")),
        (0, 3, 1, "", (3, "torch.set_num_threads, or torch's own choice")),
        (0, 3, 4, "", (2, "the share of a rank in 8 cores")),
        (5, 1, 1, "", (5, "parallel.threads")),
        (
            5,
            1,
            4,
            "2",
            (
                5,
                "parallel.threads is more than the 2 cores of this rank: threads that wait for a core make all "
                "others wait",
                "too many",
            ),
        ),
    ],
)
def test_the_least_of_what_is_asked(
    monkeypatch: pytest.MonkeyPatch, asked: int, torch_has: int, ranks: int, slurm: str, found: tuple[Any, ...]
) -> None:
    monkeypatch.setattr(device.os, "sched_getaffinity", lambda _: range(8), raising=False)
    monkeypatch.setattr(device, "busy_cores", lambda: 0)
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", slurm)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(torch_has)
    world = World("srun", size=ranks, local_size=ranks)
    assert threads(Config(parallel=ParallelConfig(threads=asked)), world) == Threads(*found)
    choose_device(Config(parallel=ParallelConfig(threads=asked)), world)
    assert torch.get_num_threads() == found[0]
    assert cores(world).number >= 1


@pytest.mark.parametrize(
    ("launcher", "of_ranks", "allowed", "found"),
    [
        (
            "python",
            [[0]],
            64,
            (1, "mpirun binds this rank to 1 core, but its share is 64: start it with --bind-to none"),
        ),
        # each has cores of its own, as Slurm's task/affinity gives them
        (
            "srun",
            [range(16), range(16, 32), range(32, 48), range(48, 64)],
            64,
            (16, "the cores that this rank is bound to"),
        ),
        # two share a NUMA node
        ("mpirun", [range(8), range(8), range(8, 16), range(8, 16)], 16, (4, "the share of a rank in 8 cores")),
        ("mpirun", [range(49)] * 49, 49, (1, "the share of a rank in 49 cores")),
        # Open MPI binds two ranks to a core each
        (
            "mpirun",
            [[0], [1]],
            64,
            (1, "mpirun binds this rank to 1 core, but its share is 32: start it with --bind-to none"),
        ),
    ],
)
def test_ranks_share_the_cores_that_more_than_one_of_them_may_run_on(
    monkeypatch: pytest.MonkeyPatch, launcher: str, of_ranks: list[Any], allowed: int, found: tuple[Any, ...]
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE", raising=False)
    monkeypatch.delenv("MPI_LOCALNRANKS", raising=False)
    if launcher != "srun":
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", str(len(of_ranks)))
    monkeypatch.setattr(device.os, "getppid", lambda: 99)
    every = {0: of_ranks[0], 99: range(allowed)} | {-rank - 1: cores for rank, cores in enumerate(of_ranks)}
    monkeypatch.setattr(device.os, "sched_getaffinity", every.__getitem__, raising=False)
    monkeypatch.setattr(usable_cores, "ranks_here", lambda world: [-rank - 1 for rank in range(world.local_size)])
    assert cores(World(launcher, size=len(of_ranks), local_size=len(of_ranks)))[:2] == found


def test_omp_num_threads_holds_for_the_whole_process() -> None:
    program = (
        "import torch\nfrom lopa_dist import LLM\nLLM('embedded')\nprint(torch.get_num_threads())\n"
        "torch.set_num_threads(1)\nLLM('embedded')\nprint(torch.get_num_threads())"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert found.stdout.split() == ["1", "1"]


@pytest.mark.parametrize(("busy", "ranks", "found"), [(0, 1, 8), (3, 1, 5), (8, 1, 1), (3, 2, 4)])
def test_cores_that_others_keep_busy_are_left_to_them(
    monkeypatch: pytest.MonkeyPatch, busy: int, ranks: int, found: int
) -> None:
    """Where ranks start together, each sees the others at work: there it is their share."""
    monkeypatch.setattr(device.os, "sched_getaffinity", lambda _: range(8), raising=False)
    monkeypatch.setattr(device, "busy_cores", lambda: busy)
    for name in ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    torch.set_num_threads(8)
    for _ in range(2):  # also when the choice was made before
        number, why, _ = threads(Config(), World("srun", size=ranks, local_size=ranks))
        assert number == found
        assert ("other programs keep" in why) == (busy > 0 and ranks == 1)
        torch.set_num_threads(number)


def test_in_a_job_of_slurm_s_nobody_looks_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "busy_cores", lambda: 1)
    monkeypatch.setattr(device.os, "sched_getaffinity", lambda _: range(2), raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "2")
    torch.set_num_threads(2)
    assert threads(Config(), World("python")) == Threads(2, "the cores of this machine")
