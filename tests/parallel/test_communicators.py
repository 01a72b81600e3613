"""One contract for all communicators: solo, threads for ranks, torch.distributed and MPI."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from lopa_dist.parallel.communicator import MpiCommunicator, Solo, TorchCommunicator
from tests.engine.ranks import on_ranks
from tests.parallel.contract import check

MPIRUN = Path(sys.executable).parent / "mpirun"
NO_MPI = importlib.util.find_spec("mpi4py") is None or not MPIRUN.exists()
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]


def test_solo() -> None:
    check(Solo())


@pytest.mark.parametrize("size", [2, 5])
def test_threads(size: int) -> None:
    """The ranks of the engine's tests."""
    on_ranks(size, check)


@pytest.mark.system
@pytest.mark.parametrize(
    ("launcher", "backend"),
    [
        pytest.param([*TORCHRUN, "3", "-m"], "gloo", id="torchrun-gloo"),
        pytest.param(
            [str(MPIRUN), "-n", "2", sys.executable, "-m"],
            "mpi",
            id="mpirun-mpi",
            marks=pytest.mark.skipif(NO_MPI, reason="needs mpi4py and an MPI here: pip install mpi4py mpich"),
        ),
    ],
)
def test_processes(launcher: list[str], backend: str) -> None:
    done = subprocess.run(
        [*launcher, "tests.parallel.contract", backend],
        capture_output=True, text=True, timeout=120, check=False, cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    printed = done.stdout + done.stderr
    for rank in range(3 if backend == "gloo" else 2):
        assert f"rank {rank} kept the contract" in printed, printed[-3000:]
    assert done.returncode == 0, printed[-3000:]


def test_a_sum_through_mpi_is_where_its_parts_were() -> None:
    """MPI adds up on the host what a GPU computed."""

    class Elsewhere:
        device = torch.device("meta")

        def cpu(self) -> torch.Tensor:
            return torch.ones(3)

    alone = SimpleNamespace(Get_rank=lambda: 0, Get_size=lambda: 1)
    alone.Iallreduce = lambda own, total: SimpleNamespace(Test=lambda: True)
    communicator = MpiCommunicator(alone, 1.0)
    assert communicator.sum(cast(torch.Tensor, Elsewhere())).device.type == "meta"


class OnGpu(torch.Tensor):
    """A tensor that only `cpu` and `copy_` bring to the host and back."""

    taken = 0

    def cpu(self, *_: object, **__: object) -> torch.Tensor:
        OnGpu.taken += 1
        return self.as_subclass(torch.Tensor).clone()


def test_gloo_takes_what_is_on_a_gpu_through_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        comm = TorchCommunicator(dist.group.WORLD)
        given = torch.arange(6, dtype=torch.int32).view(2, 3).as_subclass(OnGpu)
        assert comm.all_gather(given).tolist() == [[[0, 1, 2], [3, 4, 5]]]
        sent = []

        def filled(buffer: torch.Tensor, **_: object) -> None:
            sent.append(type(buffer))
            buffer.fill_(9)

        monkeypatch.setattr(dist, "broadcast", filled)
        address = given.data_ptr()
        assert comm.broadcast(given, 0) is given
        assert given.tolist() == [[9] * 3] * 2
        assert given.data_ptr() == address
        assert (OnGpu.taken, sent) == (2, [torch.Tensor])
        assert comm.traffic == {"all_gather": 24, "commit": 24}
    finally:
        dist.destroy_process_group()
