"""Notices an answer whose judging, in the main thread, does not end: code of the user's own may hang."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from lopa_dist.parallel.launcher import die, into_log
from lopa_dist.parallel.stop import STOPPED, Stop, StopLevel

log = logging.getLogger("lopa_dist")
LOOK_S = 1.0
LONG_S = 5.0  # no answer that takes less is given up when the job must leave
SLOW_S = 30.0  # an answer that takes longer is named


class JudgeWatch(contextlib.AbstractContextManager["JudgeWatch"]):
    """Names an answer that takes long, and ends the process if it still does when the job must leave.

    A quick judge runs between steps, so while it hangs, no step is taken and no stop is answered.

    Args:
        stop: what this rank was asked to do.
        last_acts: called before the process is ended, such as to write the journal.
    """

    def __init__(self, stop: Stop, last_acts: Sequence[Callable[[], None]] = ()) -> None:
        self.stop, self.last_acts = stop, last_acts
        self.now: tuple[str, float] | None = None  # the request whose answer is judged, and since when
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()

    @contextlib.contextmanager
    def judging(self, request: str) -> Iterator[None]:
        """Enclose the judging of a request's answer."""
        self.now = request, time.monotonic()
        try:
            yield
        finally:
            self.now = None

    def _watch(self) -> None:
        named = None
        while not self.ended.wait(LOOK_S):
            now = self.now
            if now is None:
                continue
            request, taken = now[0], time.monotonic() - now[1]
            if taken > SLOW_S and named is not now:
                named = now
                log.warning("WARNING: judging the answer to %s takes %.0f s so far; the job waits", request, taken)
            if taken > LONG_S and self.stop.level() == StopLevel.ABORT:
                return self._leave(f"{self.stop.signal} while the answer to {request} was judged, for {taken:.0f} s")

    def _leave(self, when: str) -> None:
        for act in self.last_acts:
            with contextlib.suppress(Exception):
                act()
        message = f"stopped by {when}; the same command goes on, without the answers that were not judged yet"
        into_log(message)
        die(f"lopa-dist: {message}", STOPPED)
