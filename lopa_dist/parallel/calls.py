"""Calls that all ranks of a program make together: they meet for each, and know between calls which ranks live."""

from __future__ import annotations

import atexit
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count

import torch

from lopa_dist.parallel.failures import announce_before_joining, announce_end, unanswering
from lopa_dist.parallel.group import Group
from lopa_dist.parallel.heartbeat import Heartbeat
from lopa_dist.parallel.launcher import JOIN, LaunchError, RankError, World
from lopa_dist.parallel.mesh import Mesh
from lopa_dist.parallel.rendezvous import rendezvous
from lopa_dist.parallel.stop import SIGNALS, Stop, bound_end, unclaimed
from lopa_dist.parallel.store_keys import JOINED

SILENT_S = JOIN.total_seconds()  # after which a rank that gives no sign of life between two calls counts as lost
BETWEEN = -1  # in place of a meeting's number, for what ranks tell each other between meetings
MEETINGS = count()  # numbers this process's meetings with the other ranks, those of all `Calls` together


class Calls:
    """The calls of a program that runs as one or several ranks; between them, each rank does its own work.

    Args:
        world: the ranks.
        timeout_s: how long a rank waits for the others during a call, in seconds.

    Raises:
        LaunchError: the ranks do not find each other.
    """

    def __init__(self, world: World, timeout_s: float) -> None:
        self.world, self.timeout_s = world, timeout_s
        self.heart = meet(world, timeout_s) if world.size > 1 else None

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Tell the other ranks, which wait for this one, why it refuses a call if the block raises an error.

        After a refused call there may be another.
        """
        try:
            yield
        except Exception as error:
            announce_before_joining(self.world, error, self.timeout_s, next(MEETINGS))
            raise

    @contextmanager
    def joined(self, mesh: Mesh, backend: str, device: torch.device) -> Iterator[Group]:
        """Yield the joined ranks of a call; any number of calls may follow one another.

        In the main thread, a signal that asks it to stop ends the call, unless the program answers the signal itself.

        Args:
            mesh: what each rank does.
            backend: `parallel.backend`.
            device: of this rank.

        Raises:
            RankError: another rank failed or was lost.
        """
        stop = Stop(0.0, unclaimed())
        with handlers_kept():
            try:
                group = Group(self.world, mesh, backend, self.timeout_s, device, stop, next(MEETINGS), self.check_alive)
            except LaunchError as error:
                if isinstance(error.__cause__, RankError):
                    raise error.__cause__ from None
                raise
            try:
                with group.failures.guard():
                    yield group
            except RankError:  # perhaps of a rank that hangs, for which MPI's own end would wait
                atexit.register(bound_end, self.timeout_s)
                raise

    def check_alive(self) -> None:
        """Raise a RankError if a rank that is awaited is lost; it may be busy with the program's own work."""
        if self.heart and (lost := self.heart.overdue):
            raise RankError(unanswering(lost, self.world.size, f"no sign of life for {SILENT_S:g} s"))


@cache
def meet(world: World, timeout_s: float) -> Heartbeat:
    """Connect the ranks, and return their `Heartbeat`, which beats until their programs end, also between calls.

    When a program ends, it tells the others, which may wait for its next call. After an error it ends within two
    timeouts, even if MPI's shutdown still waits for other ranks.

    Args:
        timeout_s: `parallel.timeout_s`.

    Raises:
        LaunchError: they do not find each other.
    """
    store = rendezvous(world, meeting=BETWEEN)
    store.add(JOINED, 1)
    heart = Heartbeat(store, world.rank, world.size, SILENT_S, lambda: None)

    def at_end() -> None:
        error = getattr(sys, "last_value", None)  # with which the program ends
        if error is not None:
            bound_end(timeout_s)
        heart.close()
        announce_end(world, error, next(MEETINGS))

    atexit.register(at_end)
    return heart


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Restore the caller's signal handlers at the end; threads other than the main one have changed none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
