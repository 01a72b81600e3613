"""How busy other programs keep the cores of this process."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

KEPT_BUSY = "other programs kept"  # how the warning of a job that they slowed down begins
LOOKS = 5  # how many times to look at how busy the cores are
LOOK_S = 0.2
SHORTEST_S = 1.0  # of a job, for which to say how busy other programs were: the system counts in hundredths
MUCH = 0.4  # cores that other programs keep busy


class OtherPrograms:
    """Measures how many of this process's cores other programs keep busy, from now on."""

    def __init__(self) -> None:
        self.began, self.idle, self.own = time.perf_counter(), idle_seconds(), own_seconds()

    def busy(self) -> float | None:
        """Return how many cores they kept busy on average; None if the system does not tell, or within `SHORTEST_S`."""
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
