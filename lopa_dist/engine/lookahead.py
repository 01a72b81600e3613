"""How far a causal model looks ahead in each step: how many masks follow which drafts.

No text depends on it, so the choice may follow the load. On a device with time to spare, rows cost little, and many
drafts bring many tokens per forward. On a busy one, a row that brings no token is wasted, and few drafts are best.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from lopa_dist.decode.config import DecodeConfig
from lopa_dist.decode.state import HostState
from lopa_dist.engine.forecast import LEAST_WORTH, MOST_WORTH, Choice, Forecast
from lopa_dist.engine.step_times import StepKind
from lopa_dist.ragged import Ints
from lopa_dist.rows.lookahead import Lookahead
from lopa_dist.rows.share import ALONE, Share

EXPLORE = 64  # every 64th step makes another choice, so that the times of other choices are known, too
FAR = 0.8  # a choice slower than this share of the best is tried in only one of `SELDOM` exploring steps
SELDOM = 8
RECONSIDER = 8  # all choices are compared every 8th step, which takes the host 1 to 2 ms
SETTLED, RARELY = 256, 32  # from step 256 on, they are compared every 32nd
BURSTS = 16, 64, 256  # at each of these steps, and at every (SELDOM * EXPLORE)th, `BURST` steps of another kind begin
BURST = 8
NEAR = 0.5  # a kind whose best choice is slower than this share of the best choice is measured in the first burst only
HOLD = 0.03  # another choice must be faster by this share to replace the best one so far
SECOND = 0.15  # with fixed drafts, a second group stands where the chain ends with at least this probability

FIRST = (Choice(2, 1), Choice(2, 1), Choice(0, 1))  # a job's first choices: cheap ones, of two sizes


class LookaheadPolicy:
    """Chooses the masks of every step of one replica, and how probable a draft must be to be worth a row.

    If `drafts` is a number, a group has this many masks. There is one group, and a second one where a chain is likely
    enough to end at a second depth (`SECOND`). While masks are useless beside text, most steps have no masks.

    With ``drafts=auto`` the policy makes the choice with the most tokens per second, judged by the acceptance and the
    times of this job's own steps. The times differ from rank to rank, so each rank makes a proposal, and all follow the
    first rank's (`Lockstep`).

    Args:
        config, share, blocks, masks, adapted: as in `Forecast`.
        clock: returns seconds. On a CPU it should count this process's own time, which other programs hardly change.
    """

    def __init__(
        self,
        config: DecodeConfig,
        share: Share = ALONE,
        blocks: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        masks: bool = True,
        adapted: bool = False,
    ) -> None:
        self.forecast = forecast = Forecast(config, share, blocks, masks, adapted)
        self.outcomes = forecast.outcomes
        self.clock, self.causal, self.auto = clock, config.causal, config.drafts == "auto"
        fixed = Choice(config.max_drafts * config.causal * forecast.masks, 1, forecast.branches)
        self.choice = self.first(0) if self.auto else fixed
        self.worth = LEAST_WORTH  # `Choice.worth` of this rank's next proposal
        self.steps = 0
        self.ranked: list[Choice] = []  # the best first
        self.speed: dict[Choice, float] = {}  # expected tokens per second of each choice
        self.began: float | None = None  # when the last step began
        self.rows = 0  # of that step
        self.kind = StepKind()
        self.sequences = 1  # how many the last ranking was for
        self.chosen: dict[int, int] = {}  # steps by the masks of their groups

    def first(self, step: int) -> Choice:
        """Return the choice for one of a job's first steps."""
        usual = FIRST[step] if self.forecast.masks else Choice(0, 1)
        return usual._replace(branches=self.forecast.branches)

    def lookahead(self, ends: NDArray[np.float64] | None = None) -> Lookahead:
        """Return how far the next step looks ahead, by `choice`.

        Args:
            ends: ``[S, D]`` probabilities that each sequence's chain ends at each depth; None: not known.
        """
        masks, groups, branches, _, _ = self.choice
        blocks, text = self.forecast.blocks, self.forecast.text
        if text and not self.auto and self.outcomes.useless() and sum(self.chosen.values()) % EXPLORE:
            masks = 0
        most = None if branches >= self.forecast.branches else 1
        if ends is not None and masks:
            has_group = likeliest(ends, groups)
            if not self.auto:  # auto knows what a group costs
                has_group |= likeliest(np.where(has_group, 0.0, ends), 1, SECOND)
            return Lookahead(masks, (), blocks, has_group, most)
        if groups == 1:  # also of masked models, whose steps need no choice
            return Lookahead(masks, (), blocks, None, most)
        of_chain = self.outcomes.helped.ends(masks)
        depths = sorted(range(masks), key=lambda depth: -of_chain[depth])[: groups - 1]
        return Lookahead(masks, tuple(depths), blocks, None, most)

    def foresees(self) -> bool:
        """Return whether to work out in this step what text would bring, even if text does not draft."""
        return self.auto and self.reconsiders()

    def reconsiders(self) -> bool:
        """Return whether all choices are compared again in this step."""
        return self.steps % (RECONSIDER if self.steps < SETTLED else RARELY) == 0

    def start(self) -> None:
        """Begin a generation: there is no step before its first one to be measured."""
        self.began = None

    def begin(self, ahead: Lookahead, host: HostState, chunk: bool) -> None:
        """Begin a step: count its masks and, with ``drafts=auto``, add the measured time of the step before.

        Args:
            ahead: from `lookahead`.
            host: of the step's sequences.
            chunk: whether a chunk of a prompt was computed since the last step began; that time then does not count.
        """
        self.chosen[ahead.masks] = self.chosen.get(ahead.masks, 0) + 1
        if ahead.masks:
            running = host.branches > 0
            groups = running if ahead.has_group is None else ahead.has_group & running[:, None]
            self.outcomes.ran(ahead.masks * int(np.count_nonzero(groups)))
        if self.auto:
            now = self.clock()
            if self.began is not None and not chunk:
                self.forecast.times.measured(self.rows, now - self.began, self.kind)
            self.began, self.kind = now, self.forecast.kind_of(ahead.masks, self.choice.text)

    def stepped(self, choice: Choice, rows: int) -> None:
        """End a step: its forward had `rows` rows on this rank, and all ranks follow `choice` in the next one."""
        self.choice, self.rows = choice, rows

    def count(self, before: HostState, after: HostState, masks: Ints | None, accepted_with: Ints | None) -> None:
        """Count what a step has brought; the arguments are those of `Outcomes.stepped`."""
        if self.causal:
            self.outcomes.stepped(before, after, masks, accepted_with)

    def propose(self, host: HostState) -> Choice:
        """Return this rank's choice for the next step."""
        if not self.auto:
            return self.choice
        self.steps += 1
        if self.steps < len(FIRST):
            return self.first(self.steps)
        if (other_kind := self.of_other_kind()) is not None:
            return other_kind._replace(worth=self.worth)
        if self.steps % EXPLORE == 0 and (others := self.ranked[1:4]):
            other = others[self.steps // EXPLORE % len(others)]
            if self.speed[other] > FAR * self.speed[self.ranked[0]] or self.steps % (SELDOM * EXPLORE) == 0:
                return other._replace(worth=self.worth)
        early = self.steps & (self.steps - 1) == 0  # steps 1, 2, 4, 8
        if not self.ranked or early or self.reconsiders():
            self.rank(int((host.branches > 0).sum()))
        return self.ranked[0]._replace(worth=self.worth)

    def of_other_kind(self) -> Choice | None:
        """Return a choice of another kind of step if it is time to measure that kind; several kinds take turns.

        If possible it is the best choice with only its kind changed, otherwise the best choice of that kind. A single
        step would not show its gain, because a step's masks draft for the step after it.
        """
        rare = SELDOM * EXPLORE
        begun = [first for first in BURSTS if first <= self.steps < first + BURST]
        if not self.ranked or not (begun or (self.steps > rare and self.steps % rare < BURST)):
            return None
        best = self.ranked[0]
        least = NEAR * self.speed[best] * (self.steps >= BURSTS[0] + BURST)
        kind_of = self.forecast.kind_of
        kinds = {kind_of(best.masks, best.text): best}
        alike = [best._replace(text=1 - best.text)] if self.forecast.text else []
        for choice in (*alike, *self.ranked):
            if self.speed[choice] >= least:
                kinds.setdefault(kind_of(choice.masks, choice.text), choice)
        others = list(kinds.values())[1:]
        turn = len([first for first in BURSTS if first <= self.steps]) + self.steps // rare
        return others[turn % len(others)] if others else None

    def rank(self, sequences: int) -> None:
        """Rank all choices anew. The best one so far stays first unless another is faster by more than noise."""
        forecast = self.forecast
        forecast.times.fit()
        self.sequences = sequences
        self.speed = speed = {one: forecast.tokens_a_second(one, sequences) for one in forecast.choices()}
        best = self.ranked[0] if self.ranked else None
        self.ranked = sorted(speed, key=lambda choice: -speed[choice] * (1 + HOLD * (choice == best)))
        if forecast.text:  # a row must bring as many tokens as its time would bring otherwise
            worth = 1000 * forecast.times.of(forecast.kind_of(0, 1)).line[1] * max(speed.values())
            self.worth = min(max(int(self.worth + worth) // 2, LEAST_WORTH), MOST_WORTH)


def likeliest(ends: NDArray[np.float64], most: int, least: float = 0.0) -> NDArray[np.bool_]:
    """Return which depths of each chain are the likeliest ends, ``[S, D]``; of equals, the first.

    Args:
        ends: ``[S, D]`` probabilities that each chain ends at each depth.
        most: how many depths of each chain.
        least: the least probability.
    """
    found = np.zeros(ends.shape, bool)
    if most == 1:  # a third of the time
        chains, first = np.arange(len(ends)), ends.argmax(1)
        found[chains, first] = ends[chains, first] >= least
        return found
    np.put_along_axis(found, np.argsort(-ends, 1, kind="stable")[:, :most], True, 1)
    return found & (ends >= least)
