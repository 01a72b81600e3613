"""How this process was started, and the store through which the processes of a job find each other."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from lopa_dist.whole import whole

JOIN = timedelta(seconds=300)  # ranks may import torch for a long time on a busy machine


class LaunchError(RuntimeError):
    """The processes cannot be joined; the message says what to do."""


@dataclass(frozen=True)
class World:
    """One process among those of the job. `launcher` is python, torchrun, mpirun or srun."""

    launcher: str
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


@dataclass(frozen=True)
class Start:
    """What a launcher tells of the start of a job by which a later one is known as its restart."""

    agent: str = ""  # torchrun's process, which outlives the workers that it restarts
    step: str = ""  # Slurm's job and step, which keep their numbers when the job is requeued
    requeued: int = 0  # how often it was

    def again(self, first: Start) -> bool:
        """Whether the launcher began this by itself after `first`, with the same command line."""
        requeued = self.step == first.step and self.requeued > first.requeued
        return requeued or (self.agent == first.agent != "")

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> Start:
        """That of the process that asks."""
        step = "-".join(environment.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
        began = start_ticks(os.getppid()) if "TORCHELASTIC_RUN_ID" in environment else None
        agent = f"{socket.gethostname()} {os.getppid()} {began}" if began else ""
        return cls(agent, step, int(environment.get("SLURM_RESTART_COUNT", "0")))


def start_ticks(process: int) -> int | None:
    """When a process of this machine started, in the kernel's ticks since it booted (Linux; null elsewhere)."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError):
        return None


def process_start(process: int) -> datetime | None:
    """The same as a time of day."""
    ticks = start_ticks(process)
    if ticks is None:
        return None
    boot = next(int(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if "btime" in line)
    return datetime.fromtimestamp(boot + ticks / os.sysconf("SC_CLK_TCK"))


VARIABLES = {  # launcher: what it always sets, then rank, size, local rank, local size
    "torchrun": ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "mpirun": (
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "mpirun (MPICH)": ("MPI_LOCALNRANKS", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "srun": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_GTIDS"),
}


def detect(environment: Mapping[str, str] = os.environ) -> World:
    """Read the launcher's variables; the innermost launcher counts (torchrun inside srun is torchrun)."""
    for launcher, (mark, *names) in VARIABLES.items():
        if mark not in environment:
            continue
        rank, size = int(environment[names[0]]), int(environment[names[1]])
        local_rank = int(environment.get(names[2], rank))
        here = environment.get(names[3], str(size))
        local_size = len(here.split(",")) if launcher == "srun" else int(here)  # Slurm lists the node's ranks
        if size > 1 or launcher == "torchrun":
            return World(launcher.split()[0], rank, size, local_rank, local_size)
    return World("python")


def rendezvous(world: World, environment: Mapping[str, str] = os.environ, meeting: int = 0) -> Store:
    """A store that all ranks share. Where the launcher gives no address, rank 0 chooses a free port and shares it.

    Every restart of torchrun's workers gets keys of its own: a restarted rank would otherwise read a dead rank's
    address. So does every `meeting` of the same processes.
    """
    if world.launcher == "torchrun":
        hosted = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        store = TCPStore(address, port, world.size, world.rank == 0 and not hosted, JOIN)
        return PrefixStore(f"lopa_dist/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}/{meeting}", store)
    first = TCPStore(own_address(world), 0, world.size, True, JOIN, False) if world.rank == 0 else None
    endpoint = f"{own_address(world)} {first.port}" if first else ""
    by_mpi = world.launcher == "mpirun"
    endpoint = mpi().COMM_WORLD.bcast(endpoint) if by_mpi else share_by_file(world, endpoint, environment)
    address, number = endpoint.split()
    return first or TCPStore(address, int(number), world.size, False, JOIN)


def share_by_file(world: World, endpoint: str, environment: Mapping[str, str]) -> str:
    """Return rank 0's `endpoint` on every rank, by a file in the folder that the job was submitted from.

    Srun gives no address and no broadcast.
    """
    file = rendezvous_file(environment)
    if world.rank == 0:
        with whole(file) as partial:
            partial.write_text(endpoint)
        return endpoint
    end = time.monotonic() + JOIN.total_seconds()
    while not file.exists():
        if time.monotonic() > end:
            raise LaunchError(f"rank {world.rank}: rank 0 wrote no address into {file}; is that folder shared?")
        time.sleep(0.05)
    return file.read_text()


def rendezvous_file(environment: Mapping[str, str] = os.environ) -> Path:
    """One name for every start of every job step."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    job = "-".join(environment.get(n, "0") for n in names)
    return Path(environment.get("SLURM_SUBMIT_DIR", ".")) / f".lopa_dist-rendezvous-{job}"


def own_address(world: World) -> str:
    """Where the other ranks reach this process."""
    if world.local_size == world.size:
        return "127.0.0.1"
    host = socket.gethostname()
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise LaunchError(f"this host's name {host!r} does not resolve, so other nodes cannot reach it") from error
    return host


def mpi() -> Any:
    """mpi4py's MPI, or a line that says how to get it."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise LaunchError("mpirun and parallel.backend=mpi need mpi4py: pip install mpi4py") from error
    return MPI
