"""Signs of life: every rank counts up in the store, so that any other can tell who has fallen silent.

Rank 0 reads all counts and writes down who is silent, for the others to read. So a rank makes the same few requests to
the store however many ranks there are. If each read all counts, a thousand ranks would make a million requests per
second.

The store itself may fall silent, when its host hangs or a cable is cut. Its operations have no timeout, so a thread
watches whether beats reach it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from torch._C._distributed_c10d import Store

from lopa_dist.parallel import store_keys as keys
from lopa_dist.parallel.launcher import CONNECT, JOIN

INTERVAL_S = 0.5
PATIENCE_S = 3 * INTERVAL_S  # a rank that is alive beats within this time


class Heartbeat:
    """Beats from a thread for as long as the process runs, even while a collective or the model keeps it busy.

    `cut_off` is called, once and from another thread, if the store has not answered a beat for `limit_s`.

    Attributes:
        overdue: the ranks that have been silent for `limit_s`, as rank 0 sees it; or rank 0, as this rank sees it.
    """

    def __init__(self, store: Store, rank: int, size: int, limit_s: float, cut_off: Callable[[], None]) -> None:
        self.store, self.rank, self.size, self.limit_s, self.cut_off = store, rank, size, limit_s, cut_off
        self.overdue: list[int] = []
        # a connection of its own, which operations of other threads cannot block
        store.set_timeout(CONNECT)  # for connecting, which could otherwise take as long as waiting for a key
        self._own: Store = store.clone()  # type: ignore[attr-defined]
        store.set_timeout(JOIN)
        self._own.add(keys.BEAT.format(rank), 1)
        self._answers = 0
        self._all_joined = False
        self._counts_seen = [-1] * size  # used only by rank 0, as is the next
        self._quiet_s = [0.0] * size
        self._round = (b"", 0.0)  # what rank 0 wrote last, and for how many seconds it has not changed
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def _beat(self) -> None:
        turn = 0
        with contextlib.suppress(RuntimeError):  # the store is gone: so is the job
            while not self._ended.wait(INTERVAL_S):
                self._own.add(keys.BEAT.format(self.rank), 1)
                turn += 1
                if turn % 2 == 0:  # counted in turns of this thread: a suspended process has not waited
                    self._all_joined = self._all_joined or self._own.add(keys.JOINED, 0) >= self.size
                    if self._all_joined and self.rank == 0:
                        self._look(turn)
                    if self._all_joined:
                        self._hear()
                self._answers += 1

    def _look(self, turn: int) -> None:
        """Read how far all ranks have counted, and write down who has been silent for too long."""
        counts = self._counts(self._own)
        for rank, (before, count) in enumerate(zip(self._counts_seen, counts, strict=True)):
            self._quiet_s[rank] = self._quiet_s[rank] + 2 * INTERVAL_S if count == before else 0.0
        self._counts_seen = counts
        silent = [str(rank) for rank, quiet_s in enumerate(self._quiet_s) if quiet_s > self.limit_s]
        self._own.set(keys.SILENT, " ".join([str(turn), *silent]))

    def _hear(self) -> None:
        """Read which ranks have been silent for too long, as rank 0 has written.

        If rank 0 has stopped writing, or never wrote, it is the silent rank itself.
        """
        written = self._own.get(keys.SILENT) if self._own.check([keys.SILENT]) else b""
        last, quiet_s = self._round
        self._round = (written, quiet_s + 2 * INTERVAL_S if written == last else 0.0)
        self.overdue = [0] if self._round[1] > self.limit_s else [int(rank) for rank in written.split()[1:]]

    def _watch(self) -> None:
        answers, waited = 0, 0.0  # counted in turns of this thread: a suspended process has not waited
        while not self._ended.wait(INTERVAL_S):
            waited = waited + INTERVAL_S if self._answers == answers else 0.0
            answers = self._answers
            if waited > self.limit_s:
                return self.cut_off()

    def close(self) -> None:
        """End the threads before the interpreter ends: a thread inside the store would then abort the process."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join(10)
        self._watcher.join(10)
        del self._own, self.cut_off

    def _counts(self, store: Store) -> list[int]:
        """Return how far each rank has counted."""
        beats = [keys.BEAT.format(rank) for rank in range(self.size)]
        if store.check(beats):
            return [int(count) for count in store.multi_get(beats)]
        return [store.add(beat, 0) for beat in beats]  # some ranks have not begun to count

    def silent(self) -> list[int]:
        """Return the ranks that do not beat during `PATIENCE_S`, as this rank itself sees it."""
        before = self._counts(self.store)
        time.sleep(PATIENCE_S)
        return [
            rank for rank, (old, new) in enumerate(zip(before, self._counts(self.store), strict=True)) if old == new
        ]
