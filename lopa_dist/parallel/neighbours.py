"""Ranks of this host whose processes have ended before all ranks were there.

torchrun and mpirun end a job when a rank dies, and so does ``srun --kill-on-bad-exit=1``. Plain srun does not: the
others would wait for the dead one as for one that starts slowly. Slurm's process of the node has all its ranks as
children, so each of them can see who is not there any more.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from lopa_dist.parallel.launcher import detect

STEP = "slurmstepd"  # starts all ranks of a node before the first of them runs


def ended_here(environment: Mapping[str, str] = os.environ) -> list[int]:
    """Return the ranks that srun started on this host and that run no more; empty where that cannot be told.

    It cannot where something else, such as a shell, stands between Slurm and the ranks, or without /proc.

    Args:
        environment: of this process.
    """
    own, step = detect(environment), Path(f"/proc/{os.getppid()}")
    if own.launcher != "srun":
        return []
    try:
        if (step / "comm").read_text().strip() != STEP:
            return []
        there = {rank_of(process) for process in children(step)}
    except OSError:  # one of them has just ended, or is not ours to look at
        return []
    if None in there or own.rank not in there:
        return []
    return sorted({int(rank) for rank in environment["SLURM_GTIDS"].split(",")} - there)


def children(process: Path) -> Iterator[Path]:
    """Yield the processes that a process has started and that have not ended."""
    for thread in (process / "task").iterdir():
        for number in (thread / "children").read_text().split():
            child = process.parent / number
            if (child / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                yield child


def rank_of(process: Path) -> int | None:
    """Return the rank that a process is; None where it is none, or none yet."""
    entries = (process / "environ").read_bytes().split(b"\0")
    found = detect(dict(entry.decode(errors="replace").partition("=")[::2] for entry in entries))
    return found.rank if found.launcher == "srun" else None
