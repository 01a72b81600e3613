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
        before = time.monotonic()
        while not self._ended.wait(INTERVAL_S):
            now = time.monotonic()
            if (pause := now - before - INTERVAL_S) >= LEAST_S:
                self.seconds += pause
            before = now

    def end(self) -> None:
        """Stop measuring."""
        self._ended.set()
