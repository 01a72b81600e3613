"""A job of one process is a group, too; which backend joins several follows the launcher and the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lopa_dist.parallel import group as group_file
from lopa_dist.parallel.communicator import Solo
from lopa_dist.parallel.group import Group, choose_backend, mpi_groups
from lopa_dist.parallel.launcher import LaunchError, World, detect
from lopa_dist.parallel.mesh import Mesh
from lopa_dist.parallel.stop import Stop, Stopped

CPU = torch.device("cpu")


def test_one_process() -> None:
    world = detect({})
    assert world == World("python")
    group = Group(world, Mesh(1, 1), "auto", 5, CPU, Stop(5))
    assert isinstance(group.comm, Solo)
    assert group.is_leader
    records = torch.arange(6).view(2, 3)
    assert torch.equal(group.comm.all_gather(records), records[None])
    assert group.comm.broadcast(records, 0) is records
    group.ready()
    group.prepared()
    assert [group.queue.take(3, 5) for _ in range(3)] == [[0, 1, 2], [3, 4], []]
    assert group.progress.add(done=2)["done"] == 2
    assert group.store.broadcast("name", "value") == "value"
    assert group.store.sum({"a": 1}) == {"a": 1}
    assert not group.asked_anywhere("then")
    assert group.store.gather("text", 0, 1) == ["text"]


def test_a_process_that_was_asked_to_stop_does_not_begin() -> None:
    stop = Stop(5)
    group = Group(World("python"), Mesh(1, 1), "auto", 5, CPU, stop)
    stop.ask("test")
    with pytest.raises(Stopped, match="stopped by test before the first step"):
        group.ready()


def test_meeting_again_makes_no_more_mpi_communicators(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPICH has 2,046 of them."""
    made: list[tuple[int, int]] = []

    class World4:
        def Split(self, color: int, key: int) -> Any:
            made.append((color, key))
            return SimpleNamespace(Get_rank=lambda: key)

    mpi_groups.cache_clear()
    monkeypatch.setattr(group_file, "mpi", lambda: SimpleNamespace(COMM_WORLD=World4()))
    for meeting in range(9):
        branches, _ = mpi_groups(Mesh(1, 2, 2) if meeting < 8 else Mesh(2, 2, 1), rank=2)
        assert branches.Get_rank() == (1 if meeting < 8 else 0)
    mpi_groups.cache_clear()
    assert made == [(0, 1), (1, 0), (1, 0), (2, 0)], "a pair for each mesh"


def test_impossible_backends() -> None:
    world = World("torchrun", 0, 2)
    with pytest.raises(LaunchError, match="solo with 2 ranks"):
        choose_backend(world, "solo", CPU)
    with pytest.raises(LaunchError, match="needs GPUs"):
        choose_backend(world, "nccl", CPU)
    with pytest.raises(LaunchError, match="needs mpirun"):
        choose_backend(world, "mpi", CPU)
    assert choose_backend(world, "auto", CPU) == "gloo"
    assert choose_backend(World("mpirun", 0, 2), "auto", CPU) == "mpi"


def test_ranks_that_share_a_gpu_are_joined_through_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, two = torch.device("cuda"), World("torchrun", 0, 2, 0, 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_backend(two, "auto", gpu) == choose_backend(two, "nccl", gpu) == "nccl"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert choose_backend(two, "auto", gpu) == choose_backend(two, "gloo", gpu) == "gloo"
    with pytest.raises(LaunchError, match=r"one rank a GPU, but 2 ranks share 1 here: .* or choose gloo"):
        choose_backend(two, "nccl", gpu)
