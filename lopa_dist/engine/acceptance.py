"""How many drafts of a chain are accepted, as the steps of a job show."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lopa_dist.decode.config import MOST_DRAFTS
from lopa_dist.ragged import Ints

DECAY = 0.998  # counts of drafts are multiplied by this in each step
MOST_WAITING = 64  # steps that wait to be added to the counts
HOPE = 0.8  # probability that a draft is accepted, before any draft was tried


class Acceptance:
    """How far chains of drafts were accepted, by depth; older steps count less."""

    def __init__(self, deepest: int = MOST_DRAFTS, hope: float = HOPE) -> None:
        self.hope = hope
        self.tried, self.accepted, self.drafted, self.room = np.zeros((4, deepest))
        self.asked: dict[int, list[float]] = {}  # what `ends` returned since the last count
        self.lengths: NDArray[np.float64] | None = None  # what `length` returned since then, by room
        self.waiting: list[tuple[NDArray[np.float64], Ints, Ints]] = []  # steps that are not in the counts yet

    def count(self, drafts: Ints, accepted: Ints, room: Ints) -> None:
        """Count a step.

        Args:
            drafts: ``[S]`` drafts of each sequence.
            accepted: ``[S]`` how many of them were accepted.
            room: ``[S]`` drafts that each chain had room for. If a chain has fewer, no source was sure enough of
                another, and the step counts as if the next draft had been rejected.
        """
        ends = np.zeros((len(drafts), len(self.tried) + 1))
        ends[np.arange(len(drafts)), accepted] = 1.0
        self.expect(ends, drafts, room)

    def expect(self, ends: NDArray[np.float64], drafts: Ints, room: Ints) -> None:
        """Count a step as it is expected to end, whether or not it is run.

        Args:
            ends: ``[S, D + 1]`` probabilities that the accepted part of each sequence's chain ends at each depth.
            drafts, room: as in `count`.
        """
        self.forget()
        self.waiting.append((ends, drafts, room))
        if len(self.waiting) == MOST_WAITING:  # with a fixed number of drafts, `ends` is seldom called
            self.add_waiting()

    def add_waiting(self) -> None:
        """Add the steps that wait to the counts, all at once."""
        if not self.waiting:
            return
        age = np.arange(len(self.waiting))[::-1].repeat([len(drafts) for _, drafts, _ in self.waiting])
        keep, weight = DECAY ** len(self.waiting), DECAY ** age[:, None]
        ends, drafts, room = (np.concatenate(parts) for parts in zip(*self.waiting, strict=True))
        self.waiting.clear()
        reached = ends[:, ::-1].cumsum(1)[:, ::-1]
        depth = np.arange(len(self.tried))
        open_ = depth < room[:, None]
        self.tried = keep * self.tried + (weight * open_ * reached[:, :-1]).sum(0)
        self.accepted = keep * self.accepted + (weight * reached[:, 1:]).sum(0)
        self.drafted = keep * self.drafted + (weight * (depth < drafts[:, None])).sum(0)
        self.room = keep * self.room + (weight * open_).sum(0)

    def ends(self, drafts: int) -> list[float]:
        """Return the probabilities that the accepted part of a chain ends at each depth, ``[drafts + 1]``.

        Args:
            drafts: how many the chain has room for.
        """
        if drafts in self.asked:
            return self.asked[drafts]
        self.add_waiting()
        tried = self.tried.sum()
        share = self.accepted.sum() / tried if tried else self.hope  # expected where few drafts were tried
        rates = (self.accepted + share) / (self.tried + 1)
        reached = np.cumprod(np.append(1.0, rates[:drafts]))
        ends = self.asked[drafts] = [*(reached[:-1] - reached[1:]).tolist(), float(reached[-1])]
        return ends

    def length(self, room: int) -> float:
        """Return how many drafts a chain with room for `room` drafts has on average."""
        if self.lengths is None:
            self.add_waiting()
            self.lengths = np.append(0.0, ((self.drafted + 1) / (self.room + 1)).cumsum())
        return float(self.lengths[min(room, len(self.lengths) - 1)])

    def forget(self) -> None:
        """Forget what was worked out from the counts, which change."""
        self.asked.clear()
        self.lengths = None
