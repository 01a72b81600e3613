"""How this process was started."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from lopa_dist.encodable import encodable

log = logging.getLogger("lopa_dist")

JOIN = timedelta(seconds=300)  # ranks may import torch for a long time on a busy machine
CONNECT = timedelta(seconds=10)  # for one try to reach the store


class LaunchError(RuntimeError):
    """The processes cannot be joined; the message says what to do."""


class RankError(RuntimeError):
    """A rank was lost or failed; the message names it and the first cause."""


@dataclass(frozen=True)
class World:
    """Where this process stands among the job's processes. `launcher` is python, torchrun, mpirun or srun."""

    launcher: str
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


@dataclass(frozen=True)
class Start:
    """What a launcher says about the start of a job, which tells a restart from another job."""

    agent: str = ""  # torchrun's process, which outlives the workers that it restarts
    step: str = ""  # Slurm's job and step, which keep their numbers when the job is requeued
    requeued: int = 0  # how often it was requeued

    def again(self, first: Start) -> bool:
        """Return whether the launcher itself started this again after `first`, with the same command line."""
        requeued = self.step == first.step and self.requeued > first.requeued
        return requeued or (self.agent == first.agent != "")

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> Start:
        """Return the start of the calling process."""
        step = "-".join(environment.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
        began = start_ticks(os.getppid()) if "TORCHELASTIC_RUN_ID" in environment else None
        agent = f"{socket.gethostname()} {os.getppid()} {began}" if began else ""
        return cls(agent, step, int(environment.get("SLURM_RESTART_COUNT", "0")))


def start_ticks(process: int) -> int | None:
    """Return when a process of this machine started, in kernel ticks since boot (Linux; None elsewhere)."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    except (OSError, ValueError):
        return None


OTHER_MPI = "take that MPI's mpirun, or set MPI4PY_LIBMPI to the libmpi.so of this one"
OF_OPEN_MPI, OF_MPICH = "OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS"  # variables that their mpirun always sets
# by launcher: a variable that it always sets, then those with the rank, the size, the local rank and the local size
# (SLURM_GTIDS lists the node's ranks)
VARIABLES = {
    "torchrun": ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "mpirun": (
        OF_OPEN_MPI,
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "mpirun (MPICH)": (OF_MPICH, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "srun": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_GTIDS"),
}


def detect(environment: Mapping[str, str] = os.environ) -> World:
    """Return what the launcher's variables say; the innermost launcher counts (torchrun inside srun is torchrun)."""
    for launcher, (mark, *names) in VARIABLES.items():
        if mark not in environment:
            continue
        rank, size = int(environment[names[0]]), int(environment[names[1]])
        local_rank = int(environment.get(names[2], rank))
        here = environment.get(names[3], str(size))
        local_size = len(here.split(",")) if launcher == "srun" else int(here)
        if size > 1 or launcher == "torchrun":
            return World(launcher.split()[0], rank, size, local_rank, local_size)
    return World("python")


def names_of(ranks: Iterable[int], size: int) -> str:
    """Return ranks in words, such as ``rank 1 and rank 3 of 8``."""
    return " and ".join(f"rank {rank}" for rank in sorted(ranks)) + f" of {size}"


def mpi(environment: Mapping[str, str] = os.environ) -> Any:
    """Return mpi4py's MPI, started.

    Raises:
        LaunchError: it, or an MPI library, is not installed, or mpirun is of another MPI; the message says what to do.
    """
    try:
        import mpi4py

        mpi4py.rc.initialize = False  # MPI itself would end a process of another mpirun
        from mpi4py import MPI
    except ImportError as error:
        raise LaunchError("mpirun and parallel.backend=mpi need mpi4py: pip install mpi4py") from error
    except RuntimeError as error:
        remedy = "load the module of the MPI whose mpirun started this, or pip install mpich where there is none"
        raise LaunchError(f"mpi4py finds no MPI ({str(error).splitlines()[0]}): {remedy}") from error
    if not MPI.Is_initialized():
        library = version_of(MPI)
        open_mpi, of_open_mpi = OF_OPEN_MPI in environment, library.startswith("Open MPI")
        if (open_mpi and "MPICH" in library) or (of_open_mpi and not open_mpi and OF_MPICH in environment):
            own = "Open MPI's" if open_mpi else "MPICH's or Intel's"
            raise LaunchError(f"{own} mpirun started this, but mpi4py uses {library}: {OTHER_MPI}")
        MPI.Init_thread()
        atexit.register(end_of, MPI)
    return MPI


def end_of(library: Any) -> None:
    """Finalize the MPI that this process started, if need be: a launcher takes an exit without it for a failure."""
    if not library.Is_finalized():
        library.Finalize()


def version_of(library: Any) -> str:
    """Return the name and version of the MPI library that mpi4py's MPI uses, such as ``Open MPI v5.0.8``."""
    first = library.Get_library_version().split("\n")[0].split(",")[0]
    return " ".join(first.replace("\0", " ").split())


def tell(message: str) -> None:
    """Write a line to standard error, even if nobody reads it: a launcher that was killed no longer does."""
    with contextlib.suppress(OSError):
        sys.stderr.write(message + "\n")
        sys.stderr.flush()


def into_log(message: str) -> None:
    """Write why a job ends to its log file only; standard error gets the same in its own words."""
    record = log.makeRecord(log.name, logging.ERROR, __file__, 0, encodable(message), (), None)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            with contextlib.suppress(OSError):
                handler.handle(record)


def die(message: str, status: int = 1) -> None:
    """End the process at once: after a lost rank, an orderly shutdown would wait for it."""
    tell(message)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(status)
