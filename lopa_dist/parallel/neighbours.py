"""Waiting for all ranks, and noticing those of this host whose processes have ended before.

torchrun ends a job when a rank dies, and so does ``srun --kill-on-bad-exit=1``. Plain srun does not, and neither does
MPICH's mpirun where a rank leaves with an error before it has called MPI: the others would wait for it as for one that
starts slowly. The launcher's process of the node has all its ranks as children, so each of them can see who is not
there any more.
"""

from __future__ import annotations

import logging
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

LOOK_S = 1.0  # between looks for ranks that have ended
WORD_S = 30.0  # between lines that say who is awaited
POLL_S = 0.02
REQUESTS_A_SECOND = 2000  # that all ranks together put to the store while they wait
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


def wait_until(
    reached: Callable[[], bool],
    world: World,
    state: Callable[[], str],
    limit_s: float = JOIN.total_seconds(),
    process: str = "self",
) -> None:
    """Wait until `reached()` is true, and log now and then what is missing. `process` is a rank's process id.

    Raises:
        LaunchError: that took longer than `limit_s`, or a rank of this host has ended; the message has the `state`.
    """
    began = said = looked = time.monotonic()
    ended: set[int] = set()
    while not reached():
        now = time.monotonic()
        if now - looked > LOOK_S:
            before, ended, looked = ended, {*ended_here(process=process)}, now
            if gone := before & ended:  # not only for a moment; what it announced was seen by `reached`
                names = names_of(gone, world.size)
                raise LaunchError(f"{names} ended before all had joined: killed, or it says why itself ({state()})")
        if now - began > limit_s:
            raise LaunchError(f"{state()}, after {limit_s:.0f} s")
        if now - said > WORD_S and world.local_rank == 0:
            said = now
            log.warning("%s, after %.0f s; they are waited for up to %.0f s", state(), now - began, limit_s)
        time.sleep(pause_s(world.size))


def pause_s(size: int) -> float:
    """Seconds between two looks of a waiting rank at the store: longer with many ranks, which ask the same one."""
    return max(POLL_S, size / REQUESTS_A_SECOND)


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
