"""How this process was started, and the communicator that follows from it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from lopa_dist.parallel.communicator import Communicator, Solo, TorchCommunicator


class LaunchError(RuntimeError):
    """The processes cannot be joined; the message says what to do."""


@dataclass(frozen=True)
class World:
    """One process among those of the job."""

    launcher: str  # "python" or "torchrun"
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


OTHERS = {"OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpirun", "SLURM_STEP_NUM_TASKS": "srun"}


def detect(environment: Mapping[str, str] = os.environ) -> World:
    """Read the launcher's variables.

    Raises:
        LaunchError: several ranks of a launcher that gives no rendezvous address.
    """
    if "TORCHELASTIC_RUN_ID" in environment:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        rank, size, local_rank, local_size = (int(environment[n]) for n in names)
        return World("torchrun", rank, size, local_rank, local_size)
    for name, launcher in OTHERS.items():
        if int(environment.get(name, "1")) > 1:
            raise LaunchError(
                f"{environment[name]} ranks started by {launcher}: start them through torchrun, "
                "e.g. torchrun --nproc-per-node 2 -m lopa_dist (under Slurm: sbatch launch/gsm8k.sh)"
            )
    return World("python")


def connect(world: World, backend: str, timeout_s: float, device: torch.device) -> Communicator:
    """Join the ranks. `backend` is auto, solo, gloo or nccl.

    Every restart of torchrun's workers gets keys of its own in the rendezvous store: a restarted rank would otherwise
    read a dead rank's address.
    """
    if world.size == 1:
        return Solo()
    if backend == "solo":
        raise LaunchError(f"parallel.backend=solo with {world.size} ranks: use gloo or nccl, or start one process")
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    if backend == "nccl" and device.type != "cuda":
        raise LaunchError("parallel.backend=nccl needs GPUs (model.device=cuda); use gloo on CPUs")
    timeout = timedelta(seconds=timeout_s)
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, world.size, world.rank == 0 and not hosted, timedelta(seconds=300))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefixed = PrefixStore(f"lopa_dist/{attempt}", store)
    dist.init_process_group(backend, store=prefixed, rank=world.rank, world_size=world.size, timeout=timeout)
    return TorchCommunicator()
