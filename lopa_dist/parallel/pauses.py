"""For how long a process stood still, because a scheduler or a user had suspended it, or its host."""

from __future__ import annotations

import threading
import time

INTERVAL_S = 0.5
LEAST_S = 5.0  # a shorter pause may be a busy machine's


class Pauses:
    """Measures this process's pauses from a thread, which stands still together with it.

    Attributes:
        longest_s: the longest time without a turn of the thread, also because others kept it waiting.
        seconds: how long all pauses together took in which no other thread computed either.
    """

    def __init__(self) -> None:
        self.longest_s = self.seconds = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        before, used = time.monotonic(), time.process_time()
        while not self._ended.wait(INTERVAL_S):
            now, uses = time.monotonic(), time.process_time()
            pause = now - before - INTERVAL_S
            self.longest_s = max(self.longest_s, pause)
            if pause >= LEAST_S and uses - used < pause / 10:
                self.seconds += pause
            before, used = now, uses

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join(10)
