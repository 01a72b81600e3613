"""How a job is asked to stop (preemption, a time limit, `scancel`), and how it answers in time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from types import FrameType

from lopa_dist.parallel.launcher import World, detect

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)  # the last one when a terminal is closed
STATUS = Path("/proc/self/status")  # of this process, on Linux
INTERRUPTED = 130  # exit status after Ctrl-C, as for a program that SIGINT ended
STOPPED = 75  # exit status of a job that was asked to stop and can go on (EX_TEMPFAIL)


def leave_at_signals() -> None:
    """Make `SIGNALS` end this process at once, as a job that can be resumed, until `Stop.install` takes over.

    If one of several ranks has failed, launchers send SIGTERM to the others, so SIGTERM says nothing about the job. The
    exit status is then the one that a shell reports for a process that SIGTERM ended.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        status = STOPPED
        try:
            if number == signal.SIGTERM and detect().size > 1:
                status = 128 + number
            os.write(2, f"lopa-dist: stopped by {signal.Signals(number).name} before the job began\n".encode())
        finally:  # even if nobody reads it
            os._exit(status)  # an exception would go through, or be caught by, whatever is being imported

    for number in answered():
        signal.signal(number, leave)


@contextmanager
def bounded_end(world: World, timeout_s: float) -> Iterator[None]:
    """Enclose a command: an error that leaves it ends this process within two timeouts.

    Otherwise MPI's end could wait for ever, because it waits for the other ranks, in C, where Python answers no signal.
    Until then they can notice the error and name it. A stop and an interrupt are bounded, too, since a rank that hangs
    answers neither. One process has nobody to wait for.

    Args:
        timeout_s: seconds after which a rank that does not answer counts as lost.
    """
    try:
        yield
    except BaseException:
        if world.size > 1:
            bound_end(timeout_s)
        raise


def bound_end(timeout_s: float) -> None:
    """Have this process end within two timeouts from now, whatever it waits for."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 2 * timeout_s)


def answered() -> list[signal.Signals]:
    """Return the signals that ask this process to stop: without SIGHUP under nohup, which ignores it."""
    return [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


def unclaimed() -> list[signal.Signals]:
    """Return those of `SIGNALS` that the program around an `LLM` neither answers, in Python or in C, nor ignores."""
    try:
        caught = int(STATUS.read_text(encoding="ascii", errors="replace").split("SigCgt:")[1].split()[0], 16)
    except (OSError, IndexError, ValueError):  # systems other than Linux do not tell
        caught = 0
    return [one for one in SIGNALS if signal.getsignal(one) == signal.SIG_DFL and not caught >> (one - 1) & 1]


class StopLevel(IntEnum):
    """What a rank must do. Ranks exchange it in the all-gather, and all do what the highest level says."""

    RUN = 0
    DRAIN = 1  # admit nothing more
    ABORT = 2  # leave now; the next run generates unfinished answers again
    FAILED = 3  # this rank's forward failed


class Stopped(BaseException):
    """The job was asked to stop and has done so in order; it can go on in the same run folder.

    Like KeyboardInterrupt it is not an Exception: a signal may raise it anywhere, even where the errors of one request
    are caught.

    Attributes:
        alone: whether other ranks did not leave in time: MPI's own end would wait for them.
    """

    alone = False


class Stop:
    """What one rank was asked to do. A signal asks for DRAIN, and `grace_s` seconds later for ABORT.

    Before the first step there is nothing to finish, so a signal raises `Stopped` immediately: reading a long input or
    a large model would take longer than any grace period.

    Args:
        grace_s: seconds between DRAIN and ABORT.
        signals: those that ask for it; None: `answered()`.
    """

    def __init__(self, grace_s: float, signals: Sequence[signal.Signals] | None = None) -> None:
        self.grace_s, self.asked_at, self.signal = grace_s, float("inf"), ""
        self.signals = answered() if signals is None else signals
        self.begun = False

    def begin(self) -> None:
        """Note that steps run from now on.

        Raises:
            Stopped: a stop was asked for before.
        """
        if self.asked:
            raise self.early()
        self.begun = True

    def early(self) -> Stopped:
        """Return the exception that ends a job before its first step."""
        return Stopped(f"stopped by {self.signal} before the first step")

    def ask(self, why: str) -> None:
        """Ask this rank to stop within the grace period; only the first call counts."""
        if self.asked_at == float("inf"):
            self.asked_at, self.signal = time.monotonic(), why

    @property
    def asked(self) -> bool:
        """Return whether this rank was asked to stop."""
        return self.asked_at < float("inf")

    def level(self) -> StopLevel:
        """Return what this rank must do now."""
        waited = time.monotonic() - self.asked_at
        return StopLevel.ABORT if waited >= self.grace_s else StopLevel.DRAIN if waited >= 0 else StopLevel.RUN

    def install(self, before: Callable[[], None] = lambda: None) -> None:
        """Answer the signals from now on; `before` runs first at each SIGTERM, and may end the process."""

        def answer(number: int, frame: FrameType | None) -> None:
            if number == signal.SIGTERM:
                before()
            self.ask(signal.Signals(number).name)
            if not self.begun:
                raise self.early()

        for number in self.signals:
            signal.signal(number, answer)
