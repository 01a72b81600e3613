"""How far a causal model looks ahead in each step: how many masks stand behind which of the drafts.

No text depends on it, so the choice may follow the load. In a device with time to spare, rows cost little, and many
drafts bring many tokens a forward. In a full one a row that brings no token is wasted, and one token at a time is best.
"""

from __future__ import annotations

import time
from bisect import bisect_left

import numpy as np

from lopa_dist.decode.causal_rows import Lookahead, row_counts
from lopa_dist.decode.config import MOST_DRAFTS, DecodeConfig
from lopa_dist.decode.state import HostState
from lopa_dist.ragged import Ints

MASKS = (0, 1, 2, 3, 4, 6, 8, 12, 16)  # of a group, as auto may choose
DECAY = 0.998  # what a count of drafts is worth a step later
TIME_DECAY = 0.9  # what a measured time is worth beside the next one of as many rows
EXPLORE = 32  # every so many steps another choice is tried, so that what is not chosen is known, too
HOPE = 0.8  # probability that a draft is accepted, before any was
Choice = tuple[int, int]
"""Masks of a group, and groups."""


class Acceptance:
    """How often drafts were accepted by their depth in the chain, the older ones counting less."""

    def __init__(self) -> None:
        self.tried = np.full(MOST_DRAFTS, 1.0)
        self.accepted = np.full(MOST_DRAFTS, HOPE)

    def count(self, drafts: Ints, accepted: Ints) -> None:
        """Count a step: `drafts` ``[S]`` of each sequence, and how many of them were `accepted`."""
        depth = np.arange(MOST_DRAFTS)
        self.tried = DECAY * self.tried + ((depth < drafts[:, None]) & (depth <= accepted[:, None])).sum(0)
        self.accepted = DECAY * self.accepted + (depth < accepted[:, None]).sum(0)

    def ends(self, drafts: int) -> list[float]:
        """Return with which probability a chain of so many drafts ends at each depth; ``[drafts + 1]``."""
        reached = np.cumprod(np.append(1.0, (self.accepted / self.tried)[:drafts]))
        return [*(reached[:-1] - reached[1:]).tolist(), float(reached[-1])]


class StepTimes:
    """How long a step takes by its rows: running means of measured ones, and straight lines between them."""

    def __init__(self) -> None:
        self.seconds: dict[int, tuple[float, float]] = {}  # by size class: rows and seconds, both means

    def measured(self, rows: int, seconds: float) -> None:
        """Add a step."""
        size = int(4 * np.log2(max(rows, 1)))  # a class has up to a fifth more rows than the one before
        old_rows, old_seconds = self.seconds.get(size, (float(rows), seconds))
        seconds = min(seconds, 3 * old_seconds)  # one slow step is the machine's, not the rows'
        self.seconds[size] = (
            TIME_DECAY * old_rows + (1 - TIME_DECAY) * rows,
            TIME_DECAY * old_seconds + (1 - TIME_DECAY) * seconds,
        )

    def of(self, rows: float) -> float:
        """Return the expected seconds of a step; beyond what was measured, as long a row as the nearest one."""
        points = sorted(self.seconds.values())
        if not points:
            return 1.0
        at = bisect_left(points, (rows, 0.0))
        if at == 0:
            return points[0][1]
        low_rows, low_seconds = points[at - 1]
        if at == len(points):
            return low_seconds * rows / low_rows
        high_rows, high_seconds = points[at]
        return low_seconds + (high_seconds - low_seconds) * (rows - low_rows) / (high_rows - low_rows)


class LookaheadPolicy:
    """Chooses the masks of every step of one replica.

    With a number of drafts it is always that, and `DecodeConfig.groups` groups. With ``drafts=auto`` it is what brings
    most tokens a second, by the acceptance and the times of this job's own steps. The times differ from rank to rank:
    so each rank makes a proposal, and all follow that of the first (`Lockstep`).

    Args:
        config: `drafts` and `groups` are read.
    """

    def __init__(self, config: DecodeConfig) -> None:
        self.auto = config.drafts == "auto"
        self.choice: Choice = (8, 1) if self.auto else (config.max_chain, config.groups)
        self.acceptance, self.times = Acceptance(), StepTimes()
        self.steps = 0
        self.began: float | None = None  # when the last step began, of which the time counts
        self.rows = 0  # of that step
        self.chosen: dict[int, int] = {}  # steps by masks of a group

    def lookahead(self) -> Lookahead:
        """Return how far the next step looks ahead, by `choice`."""
        masks, groups = self.choice
        ends = self.acceptance.ends(masks)
        depths = sorted(range(min(masks, len(ends))), key=lambda depth: -ends[depth])[: groups - 1]
        return Lookahead(masks, tuple(depths))

    def begin(self, host: HostState) -> Lookahead:
        """Begin a step, whose time is measured, of the sequences `host`; returns its `lookahead`."""
        ahead = self.lookahead()
        self.chosen[ahead.masks] = self.chosen.get(ahead.masks, 0) + 1
        if self.auto:
            now = time.perf_counter()
            if self.began is not None:
                self.times.measured(self.rows, now - self.began)
            prefill = ((host.committed < 0) & (host.branches > 0)).any()
            self.began = None if prefill else now
            self.rows = int(row_counts(host, ahead)[1].sum())
        return ahead

    def stepped(self, before: HostState, after: HostState, choice: Choice) -> None:
        """Count what became of a step's drafts, and make the next step by `choice`, which all ranks follow."""
        self.choice = choice
        drafted = before.drafts > 0
        if drafted.any():
            self.acceptance.count(before.drafts[drafted], after.accepted[drafted])

    def propose(self, host: HostState) -> Choice:
        """Return what this rank would do in the next step."""
        if not self.auto:
            return self.choice
        self.steps += 1
        sequences = int((host.branches > 0).sum())
        ranked = sorted(self.choices(), key=lambda choice: -self.tokens_a_second(choice, sequences))
        return ranked[1 + self.steps // EXPLORE % 3] if self.steps % EXPLORE == 0 else ranked[0]

    def choices(self) -> list[Choice]:
        """Return what may be chosen: groups behind the last draft alone, behind a quarter of all depths, behind all."""
        counts = {masks: {1, 2, (masks + 1) // 4, (masks + 1) // 2, masks + 1} if masks else {1} for masks in MASKS}
        return [(m, g) for m, groups in counts.items() for g in sorted(groups) if 1 <= g <= m + 1]

    def tokens_a_second(self, choice: Choice, sequences: int) -> float:
        """Return what so many sequences would bring if every step were made by a choice.

        A step behind an end that had a group has a chain of drafts; one behind another end has none, and brings one
        token. So of ``2 - covered`` steps one has a chain.
        """
        masks, groups = choice
        ends = self.acceptance.ends(masks)
        tokens = 1 + sum(depth * p for depth, p in enumerate(ends))
        covered = ends[-1] + sum(sorted(ends[:-1], reverse=True)[: groups - 1])
        chain, cold = 1 + masks + groups * masks, 1 + masks
        seconds = self.times.of(sequences * chain) + (1 - covered) * self.times.of(sequences * cold)
        return sequences * (tokens + 1 - covered) / seconds
