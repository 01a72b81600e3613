"""Waiting for all ranks, and noticing those of this host whose processes have ended.

torchrun ends a job when a rank dies, and so does ``srun --kill-on-bad-exit=1``. Plain srun does not, and neither does
MPICH's mpirun if a rank leaves with an error before it has called MPI: the others would wait for it as for one that
starts slowly. The launcher's process on a node is the parent of all ranks there, so each of them can see which others
have ended.
"""

from __future__ import annotations

import logging
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from lopa_dist.parallel.launcher import JOIN, LaunchError, World, detect, names_of, tell

log = logging.getLogger("lopa_dist")

LOOK_S = 1.0  # between checks for ranks that have ended
WORD_S = 30.0  # between log lines that say who is awaited
POLL_S = 0.02
REQUESTS_A_SECOND = 2000  # of all waiting ranks together to the store
PARENTS = {"srun": "slurmstepd", "mpirun": "hydra_pmi_proxy"}  # each starts all ranks of a node at once


def ended_here(environment: Mapping[str, str] = os.environ, process: str = "self") -> list[int]:
    """Return the ranks that were started on this host and no longer run; empty if that cannot be told.

    It cannot be told where something else, such as a shell, is between the launcher and the ranks, or without /proc.

    Args:
        environment: of this process, or of the rank that has started it.
        process: that rank's process id.
    """
    world = detect(environment)
    if world.launcher not in PARENTS:
        return []
    try:
        parent = Path("/proc") / state_of(Path("/proc") / process)[1]
        if (parent / "comm").read_text().strip() != PARENTS[world.launcher]:
            return []
        running = {rank_of(process, world.launcher) for process in children(parent)}
    except OSError:  # one of them has just ended, or may not be read
        return []
    if None in running or world.rank not in running:
        return []
    if world.launcher == "srun":
        started = {int(rank) for rank in environment["SLURM_GTIDS"].split(",")}
    else:  # MPICH does not say which of several hosts has which ranks
        started = {*range(world.size)} if world.local_size == world.size else set()
    return sorted(started - running)


def ranks_here(world: World) -> list[int]:
    """Return the process ids of this host's ranks, this one included; empty if that cannot be told, as `ended_here`."""
    try:
        parent = Path("/proc") / parent_of("self")
        found = [int(process.name) for process in children(parent) if rank_of(process, world.launcher) is not None]
    except (OSError, KeyError, ValueError):  # a process whose variables are not a rank's
        return []
    return found if len(found) == world.local_size and os.getpid() in found else []


def children(process: Path) -> Iterator[Path]:
    """Yield the processes that a process has started and that have not ended."""
    for thread in (process / "task").iterdir():
        for number in (thread / "children").read_text().split():
            child = process.parent / number
            if state_of(child)[0] != "Z":
                yield child


def state_of(process: Path) -> list[str]:
    """Return a process's state (Z: ended, and not yet reaped), its parent's id, and more."""
    return (process / "stat").read_text().rpartition(")")[2].split()


def rank_of(process: Path, launcher: str) -> int | None:
    """Return the rank of a process; None if it is not a rank, or not yet."""
    entries = (process / "environ").read_bytes().split(b"\0")
    world = detect(dict(entry.decode(errors="replace").partition("=")[::2] for entry in entries))
    return world.rank if world.launcher == launcher else None


def wait_until(
    reached: Callable[[], bool],
    world: World,
    state: Callable[[], str],
    limit_s: float = JOIN.total_seconds(),
    process: str = "self",
) -> None:
    """Wait until `reached()` is true, and log now and then what is missing. `process` is a rank's process id.

    Raises:
        LaunchError: that takes longer than `limit_s`, or a rank of this host has ended; the message has the `state`.
    """
    began = said = looked = time.monotonic()
    ended: set[int] = set()
    while not reached():
        now = time.monotonic()
        if now - looked > LOOK_S:
            before, ended, looked = ended, {*ended_here(process=process)}, now
            if gone := before & ended:  # in two checks; `reached` has seen what it may have announced
                names = names_of(gone, world.size)
                raise LaunchError(f"{names} ended before all had joined: killed, or its message says why ({state()})")
        if now - began > limit_s:
            raise LaunchError(f"{state()}, after {limit_s:.0f} s")
        if now - said > WORD_S and world.local_rank == 0:
            said = now
            bound = f", up to {limit_s:.0f} s" if limit_s < math.inf else ""
            log.warning("%s, after %.0f s; still waiting%s", state(), now - began, bound)
        time.sleep(pause_s(world.size))


def pause_s(size: int) -> float:
    """Return the seconds between two requests of a waiting rank: more with many ranks, which ask the same store."""
    return max(POLL_S, size / REQUESTS_A_SECOND)


@contextmanager
def watched_from_outside() -> Iterator[None]:
    """Have another process watch this one while it waits for all ranks in MPI, which has no timeout.

    Nothing in this process could end the wait: MPI starts in an import, which keeps Python's other threads from
    running. So the other process kills this one.
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
    """Watch the rank that has started this process, until it closes our standard input.

    Args:
        process: its process id.
        parent: id of the process that has started the rank.
    """
    world = detect()

    def mpi_has_begun() -> bool:
        if parent_of(process) not in ("", parent) or hung_up():
            raise LaunchError(f"{world.launcher}, which started rank {world.rank}, has ended")
        return bool(select.select([sys.stdin], [], [], LOOK_S)[0])

    try:
        wait_until(mpi_has_begun, world, lambda: f"rank {world.rank} waits for all ranks to call MPI", process=process)
    except LaunchError as error:
        tell(f"lopa-dist: {error}")
        os.kill(int(process), signal.SIGKILL)


def connection() -> list[int]:
    """Return the file descriptor through which MPICH's launcher serves this rank; empty for another MPI.

    It shows that the launcher has ended even to a rank that began to look only afterwards, whose parent is already
    another process. MPICH itself does not notice: its start-up reads on forever.
    """
    return [int(os.environ["PMI_FD"])] if "PMI_FD" in os.environ else []


def hung_up() -> bool:
    """Return whether the other end of `connection` is closed."""
    ends = select.poll()
    for file in connection():
        ends.register(file, 0)  # only for a hang-up: data is for MPI to read
    return bool(ends.poll(0))


def parent_of(process: str) -> str:
    """Return the id of a process's parent; empty if there is no /proc."""
    try:
        return state_of(Path("/proc") / process)[1]
    except OSError:
        return ""


if __name__ == "__main__":
    main(*sys.argv[1:])
