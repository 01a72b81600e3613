"""How long the main thread has been inside a step: a second thread ends the process if it would never come out.

A collective of NCCL returns at once. That a rank is lost shows only where the host waits for the device, in a call that
knows no timeout and raises nothing. So a thread looks on from outside. It ends the process when another rank has
announced an error or has fallen silent, and when all are alive but what the main thread waits for does not come.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

INTERVAL_S = 0.5
Watched = Callable[[bool], AbstractContextManager[None]]
"""A context around a part of a step; called with whether the host waits for the device in it."""


def unwatched(waits: bool) -> AbstractContextManager[None]:
    """Return the context for a rank that is alone and waits for no other."""
    return nullcontext()


class StepWatch:
    """A thread that watches the parts of steps which the main thread marks with `part`.

    Args:
        limit_s: seconds that a part may take; then `overdue` is asked.
        failed: returns what another rank announced before it left; None: nothing.
        overdue: returns which rank keeps a part from ending; None: none does, and it may go on. It gets
            whether the host waits for the device in this part.
        end: called with either answer; it ends the process.
        note: called with the number of parts that waited for the device, when it has changed.
    """

    def __init__(
        self,
        limit_s: float,
        failed: Callable[[], str | None],
        overdue: Callable[[bool], str | None],
        end: Callable[[str], None],
        note: Callable[[int], None],
    ) -> None:
        self.limit_s, self.failed, self.overdue, self.end, self.note = limit_s, failed, overdue, end, note
        self.begun = 0  # parts
        self.waits = 0  # of these, that waited for the device
        self.now: tuple[int, bool] | None = None  # the part that the main thread is in, and whether it waits
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @contextmanager
    def part(self, waits: bool) -> Iterator[None]:
        """Return a context around a part of a step; `waits`: in which the host waits for the device."""
        self.begun += 1
        self.waits += waits
        self.now = self.begun, waits
        try:
            yield
        finally:
            self.now = None

    def close(self) -> None:
        """Watch no more."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join(10)
        del self.failed, self.overdue, self.end, self.note

    def _watch(self) -> None:
        seen: tuple[int, bool] | None = None
        noted, spent, heard = 0, 0.0, False  # counted in turns of this thread: a stopped process has not waited
        while not self._ended.wait(INTERVAL_S):
            now = self.now
            if now is None or now != seen:
                seen, spent, heard = now, 0.0, False
            else:
                spent += INTERVAL_S
            try:
                if noted != self.waits:
                    noted = self.waits
                    self.note(noted)
                if now is None:
                    continue
                verdict = self.failed()
                if verdict and not heard:
                    heard = True  # the main thread has one turn more, to leave in order
                    continue
                if verdict is None and spent >= self.limit_s:
                    verdict, spent = self.overdue(now[1]), 0.0
            except RuntimeError:  # the store is gone, which the heartbeat notices
                continue
            if verdict and self.now == now:
                return self.end(verdict)
