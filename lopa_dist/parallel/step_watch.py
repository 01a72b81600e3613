"""A watch over steps: a second thread ends the process if the main thread would never come out of a step.

A collective of NCCL returns at once. A lost rank shows only where the host waits for the device, in a call that has no
timeout and raises nothing. So a thread watches from outside. It ends the process if another rank has announced an error
or has fallen silent, or if all are alive but what the main thread waits for does not come.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

INTERVAL_S = 0.5
Watched = Callable[[bool], AbstractContextManager[None]]
"""A context for a part of a step; its argument is whether the host waits for the device in it."""


def unwatched(waits: bool) -> AbstractContextManager[None]:
    """Return an empty context, for a rank that is alone and waits for no other."""
    return nullcontext()


class StepWatch:
    """A thread that watches the parts of steps that the main thread marks with `part`.

    Args:
        limit_s: seconds that a part may take before `overdue` is asked.
        failed: returns what another rank announced before it left; None: nothing.
        overdue: returns which rank keeps a part from ending; None: none does, and the part may go on. Its argument is
            whether the host waits for the device in this part.
        end: called with either answer; it ends the process.
        note: called with the number of parts that waited for the device, whenever it has changed.
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
        self.begun = 0  # parts so far
        self.waits = 0  # parts so far that waited for the device
        self.now: tuple[int, bool] | None = None  # number of the part that the main thread is in, and whether it waits
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @contextmanager
    def part(self, waits: bool) -> Iterator[None]:
        """Enclose a part of a step; `waits`: whether the host waits for the device in it."""
        self.begun += 1
        self.waits += waits
        self.now = self.begun, waits
        try:
            yield
        finally:
            self.now = None

    def close(self) -> None:
        """Stop watching."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join(10)
        del self.failed, self.overdue, self.end, self.note

    def _watch(self) -> None:
        seen: tuple[int, bool] | None = None
        noted, spent, heard = 0, 0.0, False  # counted in turns of this thread: a suspended process has not waited
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
                    heard = True  # the main thread has one more turn to leave in order
                    continue
                if verdict is None and spent >= self.limit_s:
                    verdict, spent = self.overdue(now[1]), 0.0
            except RuntimeError:  # the store is gone, which the heartbeat notices
                continue
            if verdict and self.now == now:
                return self.end(verdict)
