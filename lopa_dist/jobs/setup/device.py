"""The device of a rank, and its threads."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

from lopa_dist.config import Config
from lopa_dist.jobs.setup.other_programs import busy_cores
from lopa_dist.jobs.setup.usable_cores import cores_of_launcher, share_of_cores, usable_cores
from lopa_dist.parallel.launcher import World
from lopa_dist.surroundings import forked


class Threads(NamedTuple):
    """How many threads a rank computes with on a CPU."""

    number: int
    why: str  # what decides that
    surprise: str = ""  # the kind of reason for fewer threads than one would expect, or for too many; empty if none


def choose_device(config: Config, world: World) -> torch.device:
    """Return the GPU of this rank, or the CPU, with which torch then computes with this rank's share of the threads."""
    device = device_of(config, world)
    if device.type == "cpu":
        torch.set_num_threads(threads(config, world).number)
    return device


def device_of(config: Config, world: World) -> torch.device:
    """Return the GPU of this rank, which becomes the current one, or the CPU."""
    name = config.model.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda"):
        if not torch.cuda.is_available():
            raise ValueError(f"model.device={name}: this torch sees no GPU; use cpu")
        device = gpu(name, world)
        torch.cuda.set_device(device)
        return device
    return torch.device(name)


def gpu(name: str, world: World) -> torch.device:
    """Return the GPU that a rank computes on if `model.device` is ``cuda``, ``cuda:N`` or ``auto``."""
    return torch.device(name if ":" in name else f"cuda:{world.local_rank % torch.cuda.device_count()}")


def threads(config: Config, world: World) -> Threads:
    """Return how many threads this rank computes with on a CPU: one in a forked process."""
    found = threads_of_its_own(config, world)
    if found.number > 1 and forked():
        why = (
            "this process was forked from one that has an LLM, without its threads: it computes with one; a process "
            "that is spawned may have more"
        )
        return Threads(1, why, "forked")
    return found


def threads_of_its_own(config: Config, world: World) -> Threads:
    """Return how many threads this rank computes with on a CPU if it was not forked.

    It is the number that the user gives (`parallel.threads`), or else the smaller of the number that torch has in this
    process (by `OMP_NUM_THREADS` or `torch.set_num_threads`, for example) and this rank's share of the cores: both may
    be meant to leave room for others. A rank that is alone leaves out cores that other programs keep busy, except in a
    Slurm job, whose cores are its own.
    """
    found = cores(world)
    number = found.number
    if asked := config.parallel.threads:
        if asked <= number:
            return Threads(asked, "parallel.threads")
        why = (
            f"parallel.threads is more than the {number} cores of this rank: threads that wait for a core make all "
            "others wait"
        )
        return Threads(asked, why, "too many")
    if world.size == 1 and number > 1 and "SLURM_JOB_ID" not in os.environ and (busy := busy_cores()):
        why = f"other programs keep {busy} of {number} cores busy; parallel.threads={number} takes all"
        found = Threads(max(1, number - busy), why, "busy")
    if torch.get_num_threads() < found.number:
        given = (
            "OMP_NUM_THREADS" if os.environ.get("OMP_NUM_THREADS") else "torch.set_num_threads, or torch's own choice"
        )
        return Threads(torch.get_num_threads(), given)
    return found


def cores(world: World) -> Threads:
    """Return this rank's share of the cores that its process may run on, one thread for each."""
    usable, share = usable_cores(), share_of_cores(world)
    why = f"the share of a rank in {usable} cores" if share < usable else "the cores that this rank is bound to"
    if world.local_size == 1:
        why = "the cores of this machine"
    surprise = ""
    if (meant := cores_of_launcher() // world.local_size) > share and "OMP_NUM_THREADS" not in os.environ:
        bound = f"{usable} core{'s' * (usable > 1)}"
        why = f"mpirun binds this rank to {bound}, but its share is {meant}: start it with --bind-to none"
        surprise = "bound"
    asked = os.environ.get("SLURM_CPUS_PER_TASK", "")  # Slurm need not bind tasks to their cores
    if asked.isdigit() and 0 < int(asked) < share:
        return Threads(int(asked), "Slurm's --cpus-per-task")
    return Threads(share, why, surprise)
