"""How far a causal model looks ahead in each step: how many masks stand behind which of the drafts.

No text depends on it, so the choice may follow the load. On a device with time to spare, rows cost little, and many
drafts bring many tokens a forward. On a busy one, a row that brings no token is wasted, and few drafts are best.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lopa_dist.decode.config import MOST_DRAFTS, DecodeConfig
from lopa_dist.decode.state import HostState
from lopa_dist.ragged import Ints
from lopa_dist.rows.causal_rows import Lookahead, prompt_rows, rows_on_rank
from lopa_dist.rows.prefill import SharedPrefixes

MASKS = (0, 1, 2, 3, 4, 6, 8, 12, 16)  # of a group, as auto may choose
DECAY = 0.998  # weight of a count of drafts, a step later
REMEMBERED = 9  # steps of a size whose median time counts
EXPLORE = 64  # every 64th step makes another choice, so that the times of other choices are known, too
RECONSIDER = 8  # steps after which all choices are compared again: that takes the host half a millisecond
LEAST = 0.02  # probability that a draft is accepted below which it is not worth a row
HOPE = 0.8  # probability that a draft is accepted, before any was


class Choice(NamedTuple):
    """How far a step looks ahead."""

    masks: int  # of a group
    groups: int


FIRST = (Choice(2, 1), Choice(2, 1), Choice(0, 1))  # that a job begins with: cheap ones, of two sizes


class Acceptance:
    """How often drafts were accepted, by their depth in the chain; older ones count less."""

    def __init__(self, deepest: int = MOST_DRAFTS) -> None:
        self.tried, self.accepted = np.zeros((2, deepest))

    def count(self, drafts: Ints, accepted: Ints) -> None:
        """Count a step: `drafts` ``[S]`` of each sequence, and how many of them were `accepted`."""
        depth = np.arange(len(self.tried))
        self.tried = DECAY * self.tried + ((depth < drafts[:, None]) & (depth <= accepted[:, None])).sum(0)
        self.accepted = DECAY * self.accepted + (depth < accepted[:, None]).sum(0)

    def ends(self, drafts: int) -> list[float]:
        """Return the probabilities that a chain of `drafts` drafts ends at each depth; ``[drafts + 1]``."""
        tried = self.tried.sum()
        share = self.accepted.sum() / tried if tried else HOPE  # what to expect if few were tried
        rates = (self.accepted + share) / (self.tried + 1)
        reached = np.cumprod(np.append(1.0, rates[:drafts]))
        return [*(reached[:-1] - reached[1:]).tolist(), float(reached[-1])]


class StepTimes:
    """How long a step takes, by its rows: medians of the last measured times, and straight lines between them."""

    def __init__(self) -> None:
        self.last: dict[int, deque[tuple[int, float]]] = {}  # by size class: rows and seconds
        self.points: list[tuple[float, float]] = []  # rows and seconds of each class, the fewest rows first
        self.line = 0.0, 0.0  # seconds of a step without rows, and of a row, as all points together say

    def measured(self, rows: int, seconds: float) -> None:
        """Add a step."""
        size = int(4 * np.log2(max(rows, 1)))  # a class has up to a fifth more rows than the one before
        self.last.setdefault(size, deque(maxlen=REMEMBERED)).append((rows, seconds))

    def fit(self) -> None:
        """Take the measured steps into account."""
        self.points = sorted((median(r for r, _ in last), median(s for _, s in last)) for last in self.last.values())
        if len(self.points) > 1:
            x, y = np.array(self.points).T
            slope = max(float(np.polyfit(x, y, 1, w=1 / y)[0]), 0.0)
            self.line = max(float((y - slope * x).mean()), 0.0), slope

    def expected(self, rows: float) -> float:
        """Return the expected seconds of a step, from the steps measured until the last `fit`.

        Beyond the measured sizes it follows the line, but a row takes no longer there than in the nearest measured
        size, and more rows take no less time than fewer.
        """
        if not self.points:
            return 1.0
        at = bisect_left(self.points, (rows, 0.0))
        if 0 < at < len(self.points):
            (low_rows, low), (high_rows, high) = self.points[at - 1 : at + 1]
            return low + (high - low) * (rows - low_rows) / (high_rows - low_rows)
        near_rows, near = self.points[min(at, len(self.points) - 1)]
        bounds = sorted((near, near * rows / near_rows))
        return min(max(self.line[0] + self.line[1] * rows, bounds[0]), bounds[1])


class LookaheadPolicy:
    """Chooses the masks of every step of one replica.

    If `drafts` is a number, it is always this number, in one group. With ``drafts=auto`` it is the choice with most
    tokens a second, from the acceptance and the times of this job's own steps. The times differ from rank to rank, so
    each rank makes a proposal, and all follow the first one's (`Lockstep`).

    Args:
        config: `drafts` and `branches` are read.
        ranks: of the branch group, which share the branches.
        blocks: whether masks draft in blocks (`Lookahead.blocks`).
        masks: whether masks draft.
        clock: returns seconds. On a CPU it counts this process's own time, which other programs hardly change.
    """

    def __init__(
        self,
        config: DecodeConfig,
        ranks: int = 1,
        blocks: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        masks: bool = True,
    ) -> None:
        self.blocks, self.masks = blocks, masks
        self.ranks, self.paths, self.clock = ranks, -(-config.branches // ranks), clock
        self.causal, self.auto = config.causal, config.drafts == "auto"
        self.choice = FIRST[0] if self.auto else Choice(config.max_drafts * config.causal * masks, 1)
        self.acceptance, self.times = Acceptance(config.max_drafts), StepTimes()
        self.lengths = [1.0, float(config.max_new_tokens)]  # answers that ended and their tokens; one to begin with
        self.worth = LEAST  # probability that a draft is accepted from which on it is worth a row
        self.steps = 0
        self.ranked: list[Choice] = []  # the best first
        self.began: float | None = None  # when the last step began
        self.rows = 0  # of that step
        self.chosen: dict[int, int] = {}  # steps by masks of a group

    def lookahead(self, ends: NDArray[np.float64] | None = None) -> Lookahead:
        """Return how far the next step looks ahead, by `choice`.

        Args:
            ends: ``[S, D]`` probabilities that each sequence's chain ends at each depth; None: they are not known.
        """
        masks, groups = self.choice
        if ends is not None:
            behind = np.zeros(ends.shape, bool)
            np.put_along_axis(behind, np.argsort(-ends, 1, kind="stable")[:, :groups], True, 1)
            return Lookahead(masks, (), self.blocks, behind)
        if groups == 1:  # also of masked models, whose steps need no choice
            return Lookahead(masks, (), self.blocks)
        ends = self.acceptance.ends(masks)
        depths = sorted(range(masks), key=lambda depth: -ends[depth])[: groups - 1]
        return Lookahead(masks, tuple(depths), self.blocks)

    def begin(self, ahead: Lookahead, host: HostState, prefixes: SharedPrefixes | None, chunk: bool) -> None:
        """Begin a step, whose time is measured.

        Args:
            ahead: from `lookahead`.
            host: of the step's sequences.
            prefixes: what prompts share; None if no prompt waits.
            chunk: whether a chunk of a prompt was computed since the last step, whose time then does not count.
        """
        self.chosen[ahead.masks] = self.chosen.get(ahead.masks, 0) + 1
        if self.auto:
            now = self.clock()
            if self.began is not None and not chunk:
                self.times.measured(self.rows, now - self.began)
            self.began, self.rows = now, int(rows_on_rank(host, ahead, self.ranks).sum())
            if prefixes is not None:
                self.rows += prompt_rows(host, prefixes)

    def stepped(self, before: HostState, after: HostState, choice: Choice) -> None:
        """Count the accepted drafts of a step, and take `choice`, which all ranks follow, for the next one."""
        self.choice = choice
        if not self.causal:
            return
        drafted = (before.drafts > 0) & (after.done == 0)  # a text that ends accepts nothing behind its end
        if drafted.any():
            self.acceptance.count(before.drafts[drafted], after.accepted[drafted])
        ended = (before.done == 0) & (after.done != 0)
        if ended.any():
            answers, tokens = int(ended.sum()), int((after.complete - after.known)[ended].sum())
            weight = DECAY**answers
            self.lengths = [weight * self.lengths[0] + answers, weight * self.lengths[1] + tokens]

    def propose(self, host: HostState) -> Choice:
        """Return this rank's choice for the next step."""
        if not self.auto:
            return self.choice
        self.steps += 1
        if self.steps < len(FIRST):
            return FIRST[self.steps]
        if self.steps % EXPLORE == 0 and len(self.ranked) > 3:
            return self.ranked[1 + self.steps // EXPLORE % 3]
        if not self.ranked or self.steps < 2 * RECONSIDER or self.steps % RECONSIDER == 0:
            sequences = int((host.branches > 0).sum())
            self.times.fit()
            self.ranked = sorted(self.choices(), key=lambda choice: -self.tokens_a_second(choice, sequences))
        return self.ranked[0]

    def choices(self) -> list[Choice]:
        """Return all choices: a group behind the last draft alone, two, or groups for a quarter, half or all depths."""
        counts = {masks: {1, 2, (masks + 1) // 4, (masks + 1) // 2, masks + 1} if masks else {1} for masks in MASKS}
        return [Choice(m, g) for m, groups in counts.items() for g in sorted(groups) if 1 <= g <= m + 1]

    def tokens_a_second(self, choice: Choice, sequences: int) -> float:
        """Return the tokens a second of `sequences` sequences if every step were made by `choice`.

        The first step of an answer has no drafts, and brings one token. If the chain ends at a token with a group, the
        next step has a chain of drafts, otherwise none. So each step with a chain has ``1 - covered`` steps without.
        The last step has no masks, and brings at most as many tokens as a chain.
        """
        masks, groups = choice
        ends = self.acceptance.ends(masks)
        covered = ends[-1] + sum(sorted(ends[:-1], reverse=True)[: groups - 1])
        brought = 1 + sum(depth * p for depth, p in enumerate(ends)) + 1 - covered
        length = self.lengths[1] / self.lengths[0]
        rounds = (length - 1) / brought + (1 - 1 / brought) / 2
        of_group = masks + Lookahead(masks, (), self.blocks).lead * (masks > 0)
        chain = self.times.expected(sequences * (1 + masks + groups * of_group + self.paths * 2 * masks))
        bare = self.times.expected(sequences * (1 + masks))  # a first step or a last one
        seconds = bare + min(rounds, 1) * bare + max(rounds - 1, 0) * (chain + (1 - covered) * bare)
        return sequences * length / seconds
