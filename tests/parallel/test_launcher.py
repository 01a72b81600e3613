"""The launcher is read from its environment; the mesh from sizes and ranks."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lopa_dist.parallel.communicator import Solo
from lopa_dist.parallel.group import Group, RankError, choose_backend
from lopa_dist.parallel.launcher import LaunchError, Start, World, detect, rendezvous
from lopa_dist.parallel.mesh import Mesh, resolve
from lopa_dist.parallel.stop import Stop

CPU = torch.device("cpu")


def test_one_process() -> None:
    world = detect({})
    assert world == World("python")
    group = Group(world, Mesh(1, 1), "auto", 5, CPU, Stop(5))
    assert isinstance(group.comm, Solo)
    records = torch.arange(6).view(2, 3)
    assert torch.equal(group.comm.all_gather(records), records[None])
    assert group.comm.broadcast(records, 0) is records
    assert [group.take(3, 5), group.take(3, 5), group.take(3, 5)] == [[0, 1, 2], [3, 4], []]
    assert group.tally(done=2)["done"] == 2
    assert group.total({"a": 1}) == {"a": 1}


def test_a_restart_is_told_from_a_start() -> None:
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


def test_srun_ranks_meet_through_a_file(tmp_path: Path) -> None:
    """Rank 0 chooses the port; the others read it, and all see one store."""
    environment = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    counts: list[int] = []
    stores = []  # rank 0's serves the others until all have ended

    def join(rank: int) -> None:
        store = rendezvous(World("srun", rank, 3, rank, 3), environment)
        stores.append(store)
        counts.append(store.add("x", 1))
        while store.add("x", 0) < 3:
            pass

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (2, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(counts) == [1, 2, 3]


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
    assert issubclass(RankError, RuntimeError)


@pytest.mark.parametrize(
    ("axes", "world", "requests", "branches", "expected"),
    [
        (("auto", "auto", "auto"), 1, 10, 8, Mesh(1, 1)),
        (("auto", "auto", "auto"), 4, 10, 8, Mesh(4, 1)),
        (("auto", "auto", 1), 4, 1, 8, Mesh(1, 4)),
        (("auto", "auto", 1), 4, 1, 2, Mesh(2, 2)),
        (("auto", "auto", 1), 6, 2, 4, Mesh(2, 3)),
        (("auto", "auto", 2), 4, 10, 8, Mesh(2, 1, 2)),
        (("auto", "auto", 2), 4, 1, 8, Mesh(1, 2, 2)),
        (("auto", "auto", 2), 8, 2, 4, Mesh(1, 4, 2)),
        (("auto", 2, "auto"), 4, 10, 8, Mesh(2, 2)),
        (("auto", 2, 2), 8, 10, 8, Mesh(2, 2, 2)),
        ((4, "auto", 1), 8, 10, 8, Mesh(4, 2)),
        ((2, 3, 1), 6, 10, 8, Mesh(2, 3)),
    ],
)
def test_mesh(axes: tuple[int | str, ...], world: int, requests: int, branches: int, expected: Mesh) -> None:
    assert resolve(*axes, world, requests, branches) == expected


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6))
def test_mesh_places_every_rank_once(data: int, branch: int, tensor: int) -> None:
    mesh = Mesh(data, branch, tensor)
    places = {(d, b, t) for d in range(data) for b in range(branch) for t in range(tensor)}
    assert {mesh.place(r) for r in range(mesh.size)} == places
    assert mesh.size == len(places)


def test_impossible_mesh_names_the_numbers() -> None:
    with pytest.raises(
        LaunchError, match=r"data=2 x parallel\.branch=3 x parallel\.tensor=1 = 6, but the job has 4 ranks"
    ):
        resolve(2, 3, 1, 4, 10, 8)
    with pytest.raises(LaunchError, match="4 ranks"):
        resolve("auto", 3, "auto", 4, 10, 8)
    with pytest.raises(LaunchError, match=r"parallel\.tensor=3 = 3, but the job has 4 ranks"):
        resolve("auto", "auto", 3, 4, 10, 8)
