"""What a lesson of a job brought."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lopa_dist.learn.trainer import Lesson

STOPPED = "the job was told to stop before that paid"
KEPT = "the job was told to stop; what it learned is kept for the next attempt"


@dataclass
class Outcome:
    """What a lesson brought, for the report and for later attempts."""

    attempt: int
    done: int = 0  # requests of the job that were done
    answers: int = 0  # that all replicas together could learn from
    seconds: float = 0.0
    processor_s: float = 0.0  # of rank 0
    steps: int = 0
    rows: int = 0  # masks that were trained on, with repetitions
    acceptance_before: list[float] = field(default_factory=list)  # on held-out answers, by depth
    acceptance: list[float] = field(default_factory=list)
    accepted_before: float = 0.0  # drafts of a chain that are accepted on average
    accepted: float = 0.0
    gain: float = 1.0  # how many times as fast the rest was expected to become
    taken: bool = False
    problem: str = ""
    cut_short: bool = False  # whether a stop ended it when it paid, so that a later attempt continues it
    adopted: bool = False  # whether the job drafts with what it has learned after this lesson, or before it

    def follow(self, slices: Sequence[Lesson]) -> None:
        """Set the figures to those of a lesson's slices so far."""
        first, last = slices[0].before, slices[-1].after
        self.seconds = round(sum(one.seconds for one in slices), 2)
        self.processor_s = round(sum(one.processor_s for one in slices), 2)
        self.steps, self.rows = sum(one.steps for one in slices), sum(one.rows for one in slices)
        self.acceptance_before, self.acceptance = first.shares, last.shares
        self.accepted_before, self.accepted = round(first.length, 3), round(last.length, 3)
