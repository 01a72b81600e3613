"""Signs of life: every rank counts up in the store, so that any other can tell who has fallen silent.

The store itself may fall silent, when its host hangs or a cable is cut. Its operations know no timeout, so a thread
watches the beats' way to it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from torch._C._distributed_c10d import Store

from lopa_dist.parallel import store_keys as keys

INTERVAL_S = 0.5
PATIENCE_S = 3 * INTERVAL_S  # in which a rank that is alive beats


class Heartbeat:
    """Beats from a thread for as long as the process runs, also while a collective or the model keeps it busy.

    `cut_off` is called, once and from another thread, when the store has not answered a beat for `limit_s`.
    """

    def __init__(self, store: Store, rank: int, size: int, limit_s: float, cut_off: Callable[[], None]) -> None:
        self.store, self.rank, self.size, self.limit_s, self.cut_off = store, rank, size, limit_s, cut_off
        # a connection of its own: operations of other threads on the shared one would block it
        self._own: Store = store.clone()  # type: ignore[attr-defined]
        self._answers = 0
        self._seen = [(-1, time.monotonic())] * size  # (last count, when it changed)
        self._looked = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def _beat(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone: so is the job
            while not self._ended.wait(INTERVAL_S):
                self._own.add(keys.BEAT.format(self.rank), 1)
                self._answers += 1

    def _watch(self) -> None:
        answers, waited = 0, 0.0  # counted in turns of this thread: a process that was stopped has not waited
        while not self._ended.wait(INTERVAL_S):
            waited = waited + INTERVAL_S if self._answers == answers else 0.0
            answers = self._answers
            if waited > self.limit_s:
                return self.cut_off()

    def close(self) -> None:
        """Stop before the interpreter does: a thread inside the store then aborts the process."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join(10)
        self._watcher.join(10)
        del self._own, self.cut_off

    def _counts(self) -> list[int]:
        return [self.store.add(keys.BEAT.format(rank), 0) for rank in range(self.size)]

    def silent(self) -> list[int]:
        """Ranks that do not beat during `PATIENCE_S`."""
        before = self._counts()
        time.sleep(PATIENCE_S)
        return [rank for rank, (old, new) in enumerate(zip(before, self._counts(), strict=True)) if old == new]

    def overdue(self, limit_s: float) -> list[int]:
        """Ranks whose last beat that this process saw is older than `limit_s`; cheap to call often."""
        now = time.monotonic()
        if now - self._looked >= 2 * INTERVAL_S:
            self._looked = now
            for rank, count in enumerate(self._counts()):
                if count != self._seen[rank][0]:
                    self._seen[rank] = (count, now)
        return [rank for rank, (_, when) in enumerate(self._seen) if now - when > limit_s]
