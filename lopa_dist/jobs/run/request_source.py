"""Where a replica's requests come from: the job's queue, further tries of answers, and suspects one at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from lopa_dist.engine.request import Request


class RequestSource:
    """Hands out requests as `Engine.generate` asks for them: first those that are tried again, then those of the queue.

    The last requests may be suspects, during which a process has ended. They are held back until `next_suspect` asks
    for them, and each runs alone: if it ends the process again, it was the reason.

    Args:
        requests: all that there are.
        take: called with a limit; returns at most this many numbers of requests, in ascending order.
        suspects: how many of the requests are suspects.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        take: Callable[[int], list[int]],
        suspects: int = 0,
    ) -> None:
        self.requests, self.take = requests, take
        self.first_suspect = len(requests) - suspects
        self.again: deque[Request] = deque()  # to be tried again
        self.held: deque[int] = deque()  # numbers of suspects that `take` handed out
        self.alone = False  # whether a suspect runs, and no other request begins

    def __call__(self, most: int) -> list[Request]:
        """Return the next requests, at most `most`; empty if there are no more for now."""
        again = [self.again.popleft() for _ in range(min(most, len(self.again)))]
        if self.alone or len(again) == most:
            return again
        numbers = self.take(most - len(again))
        ready = [self.requests[number] for number in numbers if number < self.first_suspect]
        self.held.extend(numbers[len(ready) :])
        return again + ready

    def next_suspect(self) -> bool:
        """Let the next suspect be handed out, and no other request; return False if there is none."""
        self.alone = True
        self.held.extend([] if self.held else self.take(1))
        if not self.held:
            return False
        self.again.append(self.requests[self.held.popleft()])
        return True
