"""The cores that a process may run on, and a rank's share of them."""

from __future__ import annotations

import os
from collections import Counter

from lopa_dist.parallel.launcher import OF_MPICH, OF_OPEN_MPI, World
from lopa_dist.parallel.neighbours import ranks_here


def usable_cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_of_cores(world: World) -> int:
    """Return how many cores a rank has if all ranks of its host share the cores that they may run on.

    Launchers may bind each rank to cores of its own, such as srun and Open MPI's mpirun.
    """
    usable = usable_cores()
    ranks = ranks_here(world) if world.local_size > 1 and hasattr(os, "sched_getaffinity") else []
    try:
        users = Counter(core for rank in ranks for core in os.sched_getaffinity(rank))
    except OSError:  # one of them has just ended
        users = Counter()
    if not users:
        return max(1, usable // world.local_size)
    return max(1, int(sum(1 / users[core] for core in os.sched_getaffinity(0)) + 1e-6))


def cores_of_launcher() -> int:
    """Return how many cores mpirun may run on if it has started this process; 0 if it has not, or that is not known."""
    try:
        return len(os.sched_getaffinity(os.getppid())) if OF_OPEN_MPI in os.environ or OF_MPICH in os.environ else 0
    except (AttributeError, OSError):
        return 0
