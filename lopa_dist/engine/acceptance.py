"""How many drafts of a chain are accepted, as the steps of a job show."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lopa_dist.decode.config import MOST_DRAFTS
from lopa_dist.ragged import Ints

DECAY = 0.998  # counts of drafts are multiplied by this in each step
MOST_EXPECTED = 64  # steps that are expected, before they are added to the counts
HOPE = 0.8  # probability that a draft is accepted, before any draft was tried


class Acceptance:
    """How far chains of drafts were accepted, by depth; older steps count less."""

    def __init__(self, deepest: int = MOST_DRAFTS, hope: float = HOPE) -> None:
        self.hope = hope  # probability that a draft is accepted, before any draft was tried
        self.tried, self.accepted, self.drafted, self.room = np.zeros((4, deepest))
        self.asked: dict[int, list[float]] = {}  # what `ends` returned since the last count
        self.lengths: NDArray[np.float64] | None = None  # what `length` returned since then, by room
        self.expected: list[tuple[NDArray[np.float64], Ints, Ints]] = []  # steps that are not in the counts yet

    def count(self, drafts: Ints, accepted: Ints, room: Ints | None = None) -> None:
        """Count a step.

        Args:
            drafts: ``[S]`` drafts of each sequence.
            accepted: ``[S]`` how many of them were accepted.
            room: ``[S]`` drafts that each chain had room for. If a chain has fewer, no source was sure enough of
                another, and the step counts as if the next draft had been rejected. None: as many as it has.
        """
        self.forget()
        depth = np.arange(len(self.tried))
        open_ = depth < (drafts if room is None else room)[:, None]
        self.tried = DECAY * self.tried + (open_ & (depth <= accepted[:, None])).sum(0)
        self.accepted = DECAY * self.accepted + (depth < accepted[:, None]).sum(0)
        self.drafted = DECAY * self.drafted + (depth < drafts[:, None]).sum(0)
        self.room = DECAY * self.room + open_.sum(0)

    def expect(self, ends: NDArray[np.float64], drafts: Ints, room: Ints) -> None:
        """Count a step as it is expected to end, whether or not it is run; `take_expected` adds it to the counts.

        Args:
            ends: ``[S, D + 1]`` probabilities that the accepted part of each sequence's chain ends at each depth.
            drafts, room: as in `count`.
        """
        self.forget()
        self.expected.append((ends, drafts, room))
        if len(self.expected) == MOST_EXPECTED:  # with a fixed number of drafts, `ends` is seldom called
            self.take_expected()

    def take_expected(self) -> None:
        """Add the expected steps to the counts, all at once."""
        if not self.expected:
            return
        age = np.arange(len(self.expected))[::-1].repeat([len(drafts) for _, drafts, _ in self.expected])
        keep, weight = DECAY ** len(self.expected), DECAY ** age[:, None]
        ends, drafts, room = (np.concatenate(parts) for parts in zip(*self.expected, strict=True))
        self.expected.clear()
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
        self.take_expected()
        tried = self.tried.sum()
        share = self.accepted.sum() / tried if tried else self.hope  # expected where few drafts were tried
        rates = (self.accepted + share) / (self.tried + 1)
        reached = np.cumprod(np.append(1.0, rates[:drafts]))
        ends = self.asked[drafts] = [*(reached[:-1] - reached[1:]).tolist(), float(reached[-1])]
        return ends

    def length(self, room: int) -> float:
        """Return how many drafts a chain with room for `room` drafts has on average."""
        if self.lengths is None:
            self.take_expected()
            self.lengths = np.append(0.0, ((self.drafted + 1) / (self.room + 1)).cumsum())
        return float(self.lengths[min(room, len(self.lengths) - 1)])

    def forget(self) -> None:
        """Forget what was worked out from the counts, which change."""
        self.asked.clear()
        self.lengths = None
