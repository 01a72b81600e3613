"""The device of a rank, its threads, and the precision of the weights there."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import torch

from lopa_dist.config import Config, ModelOptions
from lopa_dist.jobs.setup.usable_cores import usable_cores
from lopa_dist.parallel.launcher import World

OTHERS = "other programs keep"
KEPT_BUSY = "other programs kept"  # how the warning of a job that they slowed down begins
BEYOND = "parallel.threads is more than"
LOOKS = 5  # how many times to look at how busy the cores are
LOOK_S = 0.2
SHORTEST_S = 1.0  # of which it is worth to say how busy other programs were: the system counts in hundredths
MUCH = 0.4  # cores that other programs keep busy


def choose_device(config: Config, world: World) -> torch.device:
    """Return the GPU of this rank, or the CPU with its share of the threads."""
    name = config.model.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda"):
        if not torch.cuda.is_available():
            raise ValueError(f"model.device={name}: this torch sees no GPU; use cpu")
        device = gpu(name, world)
        torch.cuda.set_device(device)
        return device
    torch.set_num_threads(threads(config, world)[0])
    return torch.device(name)


def gpu(name: str, world: World) -> torch.device:
    """Return the GPU that a rank computes on if `model.device` is ``cuda``, ``cuda:N`` or ``auto``."""
    return torch.device(name if ":" in name else f"cuda:{world.local_rank % torch.cuda.device_count()}")


def threads(config: Config, world: World) -> tuple[int, str]:
    """Return how many threads this rank computes with on a CPU, and what decides that.

    It is the number that the user gives (`parallel.threads`), or else the smaller of the number that torch has in this
    process (by `OMP_NUM_THREADS` or `torch.set_num_threads`, for example) and this rank's share of the cores: both may
    be meant to leave room for others. A rank that is alone leaves out cores that other programs keep busy, except in a
    Slurm job, whose cores are its own.
    """
    number, why = cores(world)
    if asked := config.parallel.threads:
        beyond = f"{BEYOND} the {number} cores of this rank: threads that wait for a core make all others wait"
        return asked, "parallel.threads" if asked <= number else beyond
    if world.size == 1 and number > 1 and "SLURM_JOB_ID" not in os.environ and (busy := busy_cores()):
        why = f"{OTHERS} {busy} of {number} cores busy; parallel.threads={number} takes all"
        number = max(1, number - busy)
    if torch.get_num_threads() < number:
        given = (
            "OMP_NUM_THREADS" if os.environ.get("OMP_NUM_THREADS") else "torch.set_num_threads, or torch's own choice"
        )
        return torch.get_num_threads(), given
    return number, why


class OtherPrograms:
    """Measures how many of this process's cores other programs keep busy, from now on."""

    def __init__(self) -> None:
        self.began, self.idle, self.own = time.perf_counter(), idle_seconds(), own_seconds()

    def busy(self) -> float | None:
        """Return how many cores they kept busy on average; None where the system does not tell, or in a moment."""
        passed, idle = time.perf_counter() - self.began, idle_seconds()
        if not self.idle or idle.keys() != self.idle.keys() or passed < SHORTEST_S:
            return None
        idled = sum(idle[core] - seconds for core, seconds in self.idle.items())
        return max(0.0, len(idle) - (idled + own_seconds() - self.own) / passed)


def own_seconds() -> float:
    """Return the processor time of this process and its children, those that have ended and those that run."""
    return sum(os.times()[:4]) + sum(of_descendants(os.getpid()))


def of_descendants(pid: int, folder: Path = Path("/proc")) -> Iterator[float]:
    """Yield the processor time of each process below process `pid`, with its ended children's; none if not known."""
    found: dict[int, tuple[int, float]] = {}
    for file in folder.glob("[0-9]*/stat"):
        try:
            fields = file.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            found[int(file.parent.name)] = int(fields[1]), sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, IndexError):  # it has ended
            continue
    below = {pid}
    while more := {one for one, (parent, _) in found.items() if parent in below} - below:
        below |= more
    yield from (found[one][1] for one in below - {pid})


def contended(busy: float | None, threads: int, cores: int) -> bool:
    """Return whether `threads` had to share their `cores` with other programs, which kept `busy` cores busy."""
    return busy is not None and busy >= MUCH and threads + busy > cores + MUCH / 2


@cache
def busy_cores() -> int:
    """Return how many of the cores of this process other programs keep busy; measured once, in a second at most.

    A thread that waits for a core keeps all the others waiting: two threads on two busy cores take many times as long
    as one. The least of several looks counts, because a job keeps its threads, and a program may be busy only for a
    moment. It is 0 if the system does not tell.
    """
    least = len(idle_seconds())
    for _ in range(LOOKS):
        if not least:
            break
        least = min(least, busy_now())
    return least


def busy_now() -> int:
    """Return how many of the cores of this process are busy during a fifth of a second in which the process waits."""
    before = idle_seconds()
    began = time.perf_counter()
    time.sleep(LOOK_S)
    passed = time.perf_counter() - began
    after = idle_seconds()
    idle = sum(min((after[core] - seconds) / passed, 1.0) for core, seconds in before.items() if core in after)
    return max(0, len(before) - math.ceil(idle - 0.2))


def idle_seconds(file: Path = Path("/proc/stat")) -> dict[int, float]:
    """Return for how many seconds each core of this process has been idle; empty if the system does not tell."""
    try:
        lines = file.read_text(encoding="ascii").splitlines()
        own = os.sched_getaffinity(0)
        ticks = os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):
        return {}
    fields = {int(line.split()[0][3:]): line.split() for line in lines if line.startswith("cpu") and line[3].isdigit()}
    return {core: (int(found[4]) + int(found[5])) / ticks for core, found in fields.items() if core in own}


def cores(world: World, environment: Mapping[str, str] = os.environ) -> tuple[int, str]:
    """Return this rank's share of the cores that its process may run on, and what decides that."""
    usable = usable_cores()
    share = max(1, usable // world.local_size)
    why = "the cores of this machine" if world.local_size == 1 else f"the share of a rank in {usable} cores"
    asked = environment.get("SLURM_CPUS_PER_TASK", "")  # Slurm need not bind tasks to their cores
    if asked.isdigit() and 0 < int(asked) < share:
        return int(asked), "Slurm's --cpus-per-task"
    return share, why


def choose_dtype(options: ModelOptions, device: torch.device) -> str:
    """Return the name of the weights' precision: `model.dtype`, or what suits the device."""
    if options.dtype != "auto":
        return options.dtype
    return "bf16" if device.type == "cuda" else "fp32"
