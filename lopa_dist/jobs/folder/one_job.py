"""One job at a time in a run folder: two would generate the same answers twice."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import IO, Any

from lopa_dist.checks import UserError
from lopa_dist.parallel.launcher import Start
from lopa_dist.tasks.rows import RUN_LOCK

log = logging.getLogger("lopa_dist")
NAME = RUN_LOCK
PATIENCE_S = 10.0  # to wait for a job that is about to end
EVERY_S = 5.0  # between two looks of a job at its lock
LOOKED_AT = 1000  # how many of the latest run folders are searched for that of a restarted job
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # errors of a file system without locks


class Lock:
    """The lock of the job in a run folder.

    Args:
        place: its file.
        file: the same file, open.
    """

    def __init__(self, place: Path, file: IO[str]) -> None:
        self.place, self.own, self.next = place, os.fstat(file.fileno()), 0.0

    def check(self, *_: object) -> None:
        """Raise a UserError if the launcher has restarted this job elsewhere, as it does when it believes a node lost.

        Looks at the file every `EVERY_S` seconds at most.
        """
        if time.monotonic() < self.next:
            return
        self.next = time.monotonic() + EVERY_S
        with suppress(OSError):  # a file server may be away for a while
            if not os.path.samestat(self.own, self.place.stat()):
                who = "process {process} of host {host}".format(**holder) if (holder := read(self.place)) else "another"
                raise UserError(
                    f"{self.place.parent}: this job was started again elsewhere and goes on there ({who}); this "
                    "attempt ends, and its answers are kept"
                )


@contextmanager
def only_job(
    folder: Path,
    start: Start,
    patience_s: float = PATIENCE_S,
    name: str = NAME,
    other: str = "give another hydra.run.dir",
) -> Iterator[Lock]:
    """Keep other jobs from beginning in `folder`, while rank 0 reads, works and writes there.

    The system releases the lock when this process ends, however it does. A node that goes down may leave its lock with
    a file server; if the launcher itself restarts the same job, that lock is ignored, and replaced. If the node only
    seemed to be down, the attempt there ends when it looks at its lock.

    Args:
        folder: the run folder.
        start: of this job.
        patience_s: how many seconds to wait for another job.
        name: of the lock's file.
        other: what the message advises instead of waiting.

    Raises:
        UserError: another job is at work in the folder; the message says which.
    """
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / name
    holder = read(place)
    if holder and start.again(Start(**holder["start"])):
        place.unlink()
    with place.open("a") as file:
        end = time.monotonic() + patience_s
        try:
            while not locked(file.fileno(), fcntl.LOCK_EX):
                if time.monotonic() > end:
                    raise UserError(refusal(place, read(place), other))
                time.sleep(0.1)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            log.warning("%s: its file system has no locks: see that no two jobs run in it at once", folder)
        file.truncate(0)
        own = {"host": socket.gethostname(), "process": os.getpid(), "since": f"{datetime.now():%Y-%m-%d %H:%M:%S}"}
        file.write(json.dumps(own | {"start": asdict(start)}))
        file.flush()
        yield Lock(place, file)


def own_folder(wanted: str, start: Start | None = None) -> str:
    """Make the folder `wanted` for this job alone, or one with a number after its name, and return its name.

    Otherwise, jobs that begin in the same second would share a folder, and the last one's results would replace the
    others'. A job that its launcher has restarted gets the folder that it had, which is found by its lock and not by
    its time, because the clock may have been set meanwhile.

    Args:
        wanted: the folder, which has the date and the time of day as its last two parts.
        start: of this job; None: of this process.
    """
    start = start or Start.read()
    if start.agent or start.requeued:
        latest = sorted(Path(wanted).parents[1].glob(f"*/*/{NAME}"), reverse=True)[:LOOKED_AT]
        for place in latest:
            if (holder := read(place)) and start.again(Start(**holder["start"])):
                return str(place.parent)
    for number in count(1):
        folder = Path(wanted if number == 1 else f"{wanted}-{number}")
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return str(folder)
    raise AssertionError


def locked(file: int, kind: int) -> bool:
    """Take a lock on a file if no other process has it; return whether that worked.

    Raises:
        OSError: the file system has no locks.
    """
    try:
        fcntl.lockf(file, kind | fcntl.LOCK_NB)  # a forked child does not share it, as it would with flock
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return True


def at_work(folder: Path) -> bool | None:
    """Return whether a job runs in `folder`; None if the file system does not say."""
    try:
        with (folder / NAME).open() as file:
            return not locked(file.fileno(), fcntl.LOCK_SH)
    except FileNotFoundError:
        return False
    except OSError:
        return None


def read(place: Path) -> dict[str, Any]:
    """Return what the last holder of a lock wrote; empty if there was none, or this version does not know all of it."""
    with suppress(OSError, ValueError, TypeError):
        holder = json.loads(place.read_text(encoding="utf-8"))
        if isinstance(holder, dict) and {"host", "process", "since", "start"} <= holder.keys():
            Start(**holder["start"])  # a TypeError if another version wrote it
            return holder
    return {}


def refusal(place: Path, holder: dict[str, Any], other: str) -> str:
    """Return why a job does not begin, and what to do: wait for the lock in the file `place`, or `other`."""
    who = "process {process} of host {host}, since {since}".format(**holder) if holder else "which cannot be identified"
    step = holder["start"]["step"].strip("-") if holder else ""
    return (
        f"{place.parent}: another job is at work in it ({who}{f', Slurm job {step}' if step else ''}). Wait for its "
        f"end or stop it, or {other}. If its host has gone down, remove {place}"
    )
