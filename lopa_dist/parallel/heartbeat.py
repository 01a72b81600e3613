"""Signs of life: every rank counts up in the store, so that any other can tell who has fallen silent."""

from __future__ import annotations

import contextlib
import threading
import time

from torch._C._distributed_c10d import Store

INTERVAL_S = 0.5


class Heartbeat:
    """Beats from a thread for as long as the process runs, also while a collective or the model keeps it busy."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self._seen = [(-1, time.monotonic())] * size  # (last count, when it changed)
        self._looked = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone: so is the job
            while not self._ended.wait(INTERVAL_S):
                self.store.add(f"beat/{self.rank}", 1)

    def close(self) -> None:
        """Stop before the interpreter does: a thread inside the store then aborts the process."""
        self._ended.set()
        self._thread.join(10)

    def _counts(self) -> list[int]:
        return [self.store.add(f"beat/{rank}", 0) for rank in range(self.size)]

    def silent(self, patience_s: float = 3 * INTERVAL_S) -> list[int]:
        """Ranks that do not beat while we watch for `patience_s`."""
        before = self._counts()
        time.sleep(patience_s)
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
