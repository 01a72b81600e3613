"""What the engine counts and times while it runs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import torch

from lopa_dist.decode import HostState

PHASES = ("forward", "all_gather", "decode", "commit", "host")
COUNTS = ("steps", "forwards", "tokens_filled", "records", "rows", "prompt_tokens", "prompt_reused")
COUNTERS = ("wins", "proposed", "accepted")


class Mark(Protocol):
    """A moment in a device's stream of work."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from here to another, when both are past."""


def device_mark(device: torch.device) -> Mark:
    """Return the moment when a GPU has done all that was queued so far."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


class Statistics:
    """Seconds per phase, branch wins, and a bounded history of steps.

    With a `mark`, phases are timed on the device. The host's clock would show how long it takes to queue a phase, and
    the device's work would count for whichever phase happens to wait for it.
    """

    HISTORY = 2000  # entries kept; when full, neighbours are merged

    def __init__(self, mark: Callable[[], Mark] | None = None) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.seconds_counted = dict(self.seconds)  # of these, until the end of the last step that was counted
        self.steps = 0
        self.admitted = 0  # requests
        self.forwards = 0  # sequence forwards: a step counts once for every sequence in it
        self.tokens_filled = 0
        self.records = 0  # predictions x branches of all ranks, summed over steps: what the all-gathers carried
        self.rows = 0  # computed for windows, those of branches and drafts included, on all branch ranks together
        self.proposed: Counter[int] = Counter()  # sequence forwards with so many drafts (verify=agreement)
        self.accepted: Counter[int] = Counter()  # sequence forwards in which so many drafts were accepted
        self.prompt_tokens = 0  # of all requests
        self.prompt_reused = 0  # of those, whose K/V another request had computed
        self.wins: Counter[int] = Counter()  # by branch, of forwards that had a choice
        self.filled: list[tuple[int, int, int]] = []  # (steps, sequence forwards, tokens filled)
        self._stride = 1
        self._pending = [0, 0, 0]
        self._last = time.perf_counter()
        self._mark = mark
        self._begin: Mark | None = None  # when the host last waited for the device
        self._laps: list[tuple[str, float, Mark]] = []  # since then: phase, seconds of the host, end

    def start(self) -> None:
        """Begin timing a step."""
        self._last = time.perf_counter()
        self._begin, self._laps = self._mark and self._mark(), []

    def lap(self, phase: str, waited: bool = False) -> None:
        """Count the time since the last call as `phase`.

        With `waited`, the host waited in this phase until the device had done everything queued. Then the device's own
        times of the earlier phases are known and replace the host's; this phase gets the remainder, so that the sum
        stays the time that went by.
        """
        now = time.perf_counter()
        spent, self._last = now - self._last, now
        self.seconds[phase] += spent
        if self._mark is None or self._begin is None:
            return
        if not waited:
            self._laps.append((phase, spent, self._mark()))
            return
        for earlier, launching, end in self._laps:
            later = self._begin.elapsed_time(end) / 1000 - launching
            self.seconds[earlier] += later
            self.seconds[phase] -= later
            self._begin = end
        self._begin, self._laps = self._mark(), []

    def step(self, before: HostState, after: HostState, rows: int, filled: int, seconds: dict[str, float]) -> None:
        """Count one step.

        Args:
            before, after: what the host knew before it and after it.
            rows: computed for windows.
            filled: tokens, of all sequences.
            seconds: as `self.seconds` was when the step ended.
        """
        self.seconds_counted = seconds
        branches, winner = before.branches, after.winner
        running = int((branches > 0).sum())
        self.rows += rows
        drafted = before.drafts > 0
        self.proposed.update(before.drafts[drafted].tolist())
        self.accepted.update(after.accepted[drafted].tolist())
        self.steps += 1
        self.forwards += running
        self.tokens_filled += filled
        self.wins.update(winner[branches > 1].tolist())
        for i, amount in enumerate((1, running, filled)):
            self._pending[i] += amount
        if self._pending[0] == self._stride:
            self.filled.append((self._pending[0], self._pending[1], self._pending[2]))
            self._pending = [0, 0, 0]
        if len(self.filled) >= self.HISTORY:
            pairs = zip(self.filled[::2], self.filled[1::2], strict=False)
            self.filled = [(a[0] + b[0], a[1] + b[1], a[2] + b[2]) for a, b in pairs]
            self._stride *= 2

    def totals(self) -> dict[str, Any]:
        """The sums, JSON-able, for another process to `absorb`."""
        return {name: getattr(self, name) for name in ("seconds", *COUNTERS, *COUNTS)}

    def absorb(self, totals: dict[str, Any]) -> None:
        """Add another replica's sums."""
        for phase in PHASES:
            self.seconds[phase] += totals["seconds"][phase]
            self.seconds_counted[phase] += totals["seconds"][phase]
        for name in COUNTERS:
            getattr(self, name).update({int(value): count for value, count in totals[name].items()})
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + totals[name])

    def acceptance(self) -> list[float]:
        """Return, for each depth, how many of the drafts that were proposed there were accepted, as a share.

        A draft counts as accepted with all drafts before it. Empty where nothing was drafted.
        """
        deepest = max(self.proposed, default=0)
        reached = [sum(count for drafts, count in self.proposed.items() if drafts >= d) for d in range(1, deepest + 1)]
        passed = [sum(count for drafts, count in self.accepted.items() if drafts >= d) for d in range(1, deepest + 1)]
        return [a / b for a, b in zip(passed, reached, strict=True)]

    def accepted_per_forward(self) -> float:
        """Return the mean number of drafts accepted in a sequence forward that had any; 0 where none had."""
        forwards = sum(self.accepted.values())
        return sum(drafts * count for drafts, count in self.accepted.items()) / forwards if forwards else 0.0

    def milliseconds(self) -> dict[str, float]:
        """Mean milliseconds of a step by phase, and in total."""
        per_step = {phase: 1000 * s / max(1, self.steps) for phase, s in self.seconds.items()}
        return per_step | {"total": sum(per_step.values())}
