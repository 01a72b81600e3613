"""For how long a process stood still, because a scheduler or a user had suspended it."""

from __future__ import annotations

import threading
import time

INTERVAL_S = 0.5
LEAST_S = 5.0  # a shorter pause may be a busy machine's


class Pauses:
    """Measures this process's pauses from a thread, which stands still together with it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """How long all pauses so far took."""
        self._ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        before, used = time.monotonic(), time.process_time()
        while not self._ended.wait(INTERVAL_S):
            now, uses = time.monotonic(), time.process_time()
            pause = now - before - INTERVAL_S
            if pause >= LEAST_S and uses - used < pause / 10:  # else another thread kept this one waiting
                self.seconds += pause
            before, used = now, uses

    def end(self) -> None:
        """Stop measuring."""
        self._ended.set()
