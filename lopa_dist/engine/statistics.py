"""What the engine counts and times while it runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from lopa_dist.engine.work import Work
from lopa_dist.ragged import Ints

if TYPE_CHECKING:  # figures are shown without torch, which takes seconds to import
    import torch

    from lopa_dist.decode import HostState

PHASES = ("forward", "all_gather", "decode", "commit", "host")
COUNTS = ("steps", "forwards", "tokens_filled", "records")


class Mark(Protocol):
    """A moment in a device's stream of work."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds from this moment to another, when both are past."""


def device_mark(device: torch.device, again: Any = None) -> Any:
    """Return a mark of when a GPU has done all that is queued so far: a new `Mark`, or `again`, an old one to reuse."""
    import torch

    event = again or torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


class Statistics(Work):
    """The work of all requests together, and seconds per phase.

    With a `mark`, phases are timed on the device. The host's clock would show how long it takes to queue a phase, and
    the device's work would count for whichever phase happens to wait for it.
    """

    def __init__(self, mark: Callable[[Mark | None], Mark] | None = None) -> None:
        super().__init__()
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.seconds_counted = dict(self.seconds)  # until the end of the last step that was counted
        self.steps = 0
        self.admitted = 0  # requests
        self.forwards = 0  # sequence forwards: a step counts once for every sequence in it
        self.tokens_filled = 0
        self.records = 0  # records that all-gathers carried: predictions x branches, over all ranks and steps
        self._last = time.perf_counter()
        self._mark = mark
        self._past: list[Mark] = []  # to be reused: making one takes longer than recording it
        self._begin: Mark | None = None  # when the host last waited for the device
        self._laps: list[tuple[str, float, Mark]] = []  # since then: phase, seconds of the host, end

    def start(self) -> None:
        """Begin timing a generation; later times count from here."""
        self._last = time.perf_counter()
        self._begin, self._laps = self._mark and self._mark(None), []

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
            self._laps.append((phase, spent, self._mark(self._past.pop() if self._past else None)))
            return
        for earlier, launching, end in self._laps:
            later = self._begin.elapsed_time(end) / 1000 - launching
            self.seconds[earlier] += later
            self.seconds[phase] -= later
            self._past.append(self._begin)
            self._begin = end
        self._begin, self._laps = self._mark(self._begin), []

    def step(
        self,
        before: HostState,
        after: HostState,
        rows: Ints,
        works: Sequence[Work | None],
        accepted_with: Ints | None,
        seconds: dict[str, float],
    ) -> None:
        """Count one step, in total and for each request that took part in it.

        Args:
            before, after: what the host knew before it and after it.
            rows: ``[S]`` rows that were computed (`ForwardBatch.computed`).
            works: ``[S]`` of the sequences' requests; None for those that had nothing to do.
            accepted_with: ``[S, K]`` as in `Winner`.
            seconds: what `self.seconds` was when the step ended.
        """
        self.seconds_counted = seconds
        filled = before.masked - after.masked + after.end - before.end  # [S]
        self.tokens_filled += int(filled[before.branches > 0].sum())
        running = 0
        by_branches = [[]] * len(works) if accepted_with is None else accepted_with.tolist()
        columns = (x.tolist() for x in (rows, before.branches, after.winner, before.drafts, after.accepted))
        for own, computed, branches, winner, drafts, accepted, of_branches in zip(
            works, *columns, by_branches, strict=True
        ):
            if not branches or own is None:
                continue
            running += 1
            for work in (self, own):
                work.rows += computed
                if drafts:
                    work.proposed[drafts] += 1
                    work.accepted[accepted] += 1
                if branches > 1:
                    work.wins[winner] += 1
                    work.accepted_with.update(dict(enumerate(of_branches)))
        self.steps += 1
        self.forwards += running

    def sums(self) -> dict[str, Any]:
        """Return the sums, ready for JSON, for another process to `absorb`."""
        return {"work": self.totals(), **{name: getattr(self, name) for name in ("seconds", *COUNTS)}}

    def absorb(self, sums: dict[str, Any]) -> None:
        """Add what another replica's `sums` returned."""
        for phase in PHASES:
            self.seconds[phase] += sums["seconds"][phase]
            self.seconds_counted[phase] += sums["seconds"][phase]
        self.add(sums["work"])
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + sums[name])

    def milliseconds(self) -> dict[str, float]:
        """Return the mean milliseconds of a step by phase, and in total."""
        per_step = {phase: 1000 * s / max(1, self.steps) for phase, s in self.seconds.items()}
        return per_step | {"total": sum(per_step.values())}
