"""What a job can do without (W&B, pages): it never ends a job, nor keeps it waiting longer than a limit."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from lopa_dist.checks import in_a_line

log = logging.getLogger("lopa_dist")
T = TypeVar("T")
ABANDON_S = 5.0  # the longest that letting go of something lost may take


class Extra:
    """Acts of one kind, which a thread of their own does one after another.

    The first act that fails or takes too long is the last: a warning says so, and the job goes on without them.

    Args:
        what: what the warning calls this loss.
        limit_s: seconds that an act may take.
        abandon: called when an act fails or takes too long, to let go of what it used.
    """

    def __init__(self, what: str, limit_s: float, abandon: Callable[[], None] = lambda: None) -> None:
        self.what, self.limit_s, self.abandon = what, limit_s, abandon
        self.lost = False
        self._lock = threading.Lock()
        self._acts: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()  # None: there is nothing more to do
        self._since: float | None = None  # when the act that is under way began
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def post(self, act: Callable[[], Any]) -> None:
        """Have `act` done soon, without waiting for it."""
        began = self._since
        if began is not None and time.monotonic() - began > self.limit_s:
            self._lose(f"no answer for {self.limit_s:g} s")
        if not self.lost:
            self._acts.put(act)

    def wait(self, act: Callable[[], T], limit_s: float | None = None) -> T | None:
        """Wait until `act` and all acts before it are done, and return what it returns; None where they are lost.

        Args:
            act: to be done.
            limit_s: seconds for all of them; None for the constructor's.
        """
        limit_s = self.limit_s if limit_s is None else limit_s
        results: list[T] = []
        done = threading.Event()

        def noted() -> None:
            try:
                results.append(act())
            except Exception as error:
                self._lose(in_a_line(error))
            finally:
                done.set()

        self.post(noted)
        end = time.monotonic() + limit_s
        while not self.lost and not done.wait(0.05):
            if time.monotonic() > end:
                self._lose(f"no answer for {limit_s:g} s")
        return results[0] if results and not self.lost else None

    def close(self) -> None:
        """End the thread once it has done what it was given.

        A thread that still runs when the interpreter ends may end the process with SIGABRT. So this waits for it,
        `ABANDON_S` at most, unless the acts are lost.
        """
        self._acts.put(None)
        if not self.lost:
            self._thread.join(ABANDON_S)

    def _work(self) -> None:
        while not self.lost and (act := self._acts.get()) is not None:
            self._since = time.monotonic()
            try:
                act()
            except Exception as error:
                self._lose(in_a_line(error))
            self._since = None

    def _lose(self, why: str) -> None:
        with self._lock:
            if self.lost:
                return
            self.lost = True
        log.warning("WARNING: %s: %s. The job goes on without it.", self.what, why)
        letting_go = threading.Thread(target=self.abandon, daemon=True)
        letting_go.start()
        letting_go.join(ABANDON_S)
