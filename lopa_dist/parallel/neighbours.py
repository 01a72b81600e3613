"""Ranks of this host whose processes have ended before all ranks were there.

torchrun ends a job when a rank dies, and so does ``srun --kill-on-bad-exit=1``. Plain srun does not, and neither does
MPICH's mpirun where a rank leaves with an error before it has called MPI: the others would wait for it as for one that
starts slowly. The launcher's process of the node has all its ranks as children, so each of them can see who is not
there any more.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from lopa_dist.parallel.launcher import JOIN, detect, names_of, tell

LOOK_S = 1.0  # between looks for ranks that have ended
WORD_S = 30.0  # between lines that say who is awaited
ENDED = "ended before all had joined: killed, or it says why itself"
PARENTS = {"srun": "slurmstepd", "mpirun": "hydra_pmi_proxy"}  # each starts all ranks of a node at once


def ended_here(environment: Mapping[str, str] = os.environ, process: str = "self") -> list[int]:
    """Return the ranks that were started on this host and that run no more; empty where that cannot be told.

    It cannot where something else, such as a shell, stands between the launcher and the ranks, or without /proc.

    Args:
        environment: of this process, or of the rank that has started it.
        process: the number of that rank's process.
    """
    world = detect(environment)
    if world.launcher not in PARENTS:
        return []
    try:
        parent = Path("/proc") / state_of(Path("/proc") / process)[1]
        if (parent / "comm").read_text().strip() != PARENTS[world.launcher]:
            return []
        running = {rank_of(process, world.launcher) for process in children(parent)}
    except OSError:  # one of them has just ended, or is not ours to look at
        return []
    if None in running or world.rank not in running:
        return []
    if world.launcher == "srun":
        started = {int(rank) for rank in environment["SLURM_GTIDS"].split(",")}
    else:  # MPICH does not say which of several hosts has which ranks
        started = {*range(world.size)} if world.local_size == world.size else set()
    return sorted(started - running)


def children(process: Path) -> Iterator[Path]:
    """Yield the processes that a process has started and that have not ended."""
    for thread in (process / "task").iterdir():
        for number in (thread / "children").read_text().split():
            child = process.parent / number
            if state_of(child)[0] != "Z":
                yield child


def state_of(process: Path) -> list[str]:
    """Return the state of a process (Z: ended, and not yet noticed), its parent's number, and more."""
    return (process / "stat").read_text().rpartition(")")[2].split()


def rank_of(process: Path, launcher: str) -> int | None:
    """Return the rank of a process; None if it is not a rank, or not yet."""
    entries = (process / "environ").read_bytes().split(b"\0")
    world = detect(dict(entry.decode(errors="replace").partition("=")[::2] for entry in entries))
    return world.rank if world.launcher == launcher else None


@contextmanager
def watched_from_outside() -> Iterator[None]:
    """Return a context around what waits for all ranks in MPI, which knows no timeout.

    Nothing in this process could end it: MPI begins in an import, which keeps Python's other threads from running. So
    another process watches, and kills this one.
    """
    watch = subprocess.Popen(
        [sys.executable, "-m", __name__, f"{os.getpid()}", f"{os.getppid()}"],
        stdin=subprocess.PIPE, pass_fds=connection(),
    )  # fmt: skip
    try:
        yield
    finally:
        watch.communicate()


def main(process: str, parent: str) -> None:
    """Watch over the rank that has started this process, until it closes our standard input.

    Args:
        process: its number.
        parent: number of the process that has started the rank.
    """
    world, began, said = detect(), time.monotonic(), time.monotonic()
    before: set[int] = set()
    why = ""
    while not why:
        if select.select([sys.stdin], [], [], LOOK_S)[0]:
            return
        ended, now = {*ended_here(process=process)}, time.monotonic()
        if gone := before & ended:
            why = f"{names_of(gone, world.size)} {ENDED}"
        elif parent_of(process) not in ("", parent) or hung_up():
            why = f"{world.launcher}, which started rank {world.rank}, has ended"
        elif now - began > JOIN.total_seconds():
            why = f"rank {world.rank} has waited for {JOIN.total_seconds():.0f} s for all ranks to call MPI"
        elif now - said > WORD_S:
            said = now
            tell(f"lopa-dist: rank {world.rank} waits for all ranks to call MPI, after {now - began:.0f} s")
        before = ended
    tell(f"lopa-dist: {why}")
    os.kill(int(process), signal.SIGKILL)


def connection() -> list[int]:
    """Return the file through which MPICH's launcher serves this rank; empty for another MPI.

    It tells that the launcher has ended also to a rank that began to look only then, whose parent is another process
    already. MPICH itself does not notice: its start reads on for ever.
    """
    return [int(os.environ["PMI_FD"])] if "PMI_FD" in os.environ else []


def hung_up() -> bool:
    """Return whether the other end of `connection` is closed."""
    ends = select.poll()
    for file in connection():
        ends.register(file, 0)  # what was sent is for MPI to read
    return bool(ends.poll(0))


def parent_of(process: str) -> str:
    """Return the number of a process's parent; empty where there is no /proc."""
    try:
        return state_of(Path("/proc") / process)[1]
    except OSError:
        return ""


if __name__ == "__main__":
    main(*sys.argv[1:])
