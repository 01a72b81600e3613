"""The launcher is read from its environment."""

from __future__ import annotations

import pytest
import torch

from lopa_dist.parallel.communicator import Solo
from lopa_dist.parallel.launcher import LaunchError, World, connect, detect

CPU = torch.device("cpu")


def test_one_process() -> None:
    world = detect({})
    assert world == World("python")
    comm = connect(world, "auto", 5, CPU)
    assert isinstance(comm, Solo)
    records = torch.arange(6).view(2, 3)
    assert torch.equal(comm.all_gather(records), records[None])
    assert comm.broadcast(records, 0) is records


def test_torchrun() -> None:
    names = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert detect({"TORCHELASTIC_RUN_ID": "x", **names}) == World("torchrun", 3, 4, 1, 2)


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_other_launchers_are_told_what_to_do(name: str) -> None:
    with pytest.raises(LaunchError, match="torchrun --nproc-per-node"):
        detect({name: "2"})
    assert detect({name: "1"}) == World("python")


def test_impossible_backends() -> None:
    world = World("torchrun", 0, 2)
    with pytest.raises(LaunchError, match="solo with 2 ranks"):
        connect(world, "solo", 5, CPU)
    with pytest.raises(LaunchError, match="needs GPUs"):
        connect(world, "nccl", 5, CPU)
