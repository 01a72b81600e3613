"""How far a causal model looks ahead in each step: how many masks follow which drafts.

No text depends on it, so the choice may follow the load. On a device with time to spare, rows cost little, and many
drafts bring many tokens per forward. On a busy one, a row that brings no token is wasted, and few drafts are best.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lopa_dist.decode.config import DecodeConfig
from lopa_dist.decode.state import HostState
from lopa_dist.engine.acceptance import DECAY, HOPE, Acceptance
from lopa_dist.engine.drafter import MASKS
from lopa_dist.engine.step_times import Kind, TimesByKind
from lopa_dist.ragged import Ints
from lopa_dist.rows.lookahead import Lookahead
from lopa_dist.rows.share import ALONE, Share

GROUP_SIZES = (0, 1, 2, 3, 4, 6, 8, 12, 16)  # sizes of a group of masks that auto may choose
TRIAL = 1024  # rows of masks that are run before masks may be found useless
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
LEAST, MOST_WORTH = 20, 900  # bounds of `Choice.worth`


class Choice(NamedTuple):
    """How far a step looks ahead."""

    masks: int  # of a group
    groups: int
    branches: int = 0  # whether branches run beside the chain
    text: int = 1  # whether text drafts, where it may; without it, a chain goes no further than masks predicted
    worth: int = LEAST  # thousandths: the least probability of being reached and right that makes a draft worth a row


FIRST = (Choice(2, 1), Choice(2, 1), Choice(0, 1))  # a job's first choices: cheap ones, of two sizes


class LookaheadPolicy:
    """Chooses the masks of every step of one replica, and how probable a draft must be to be worth a row.

    If `drafts` is a number, a group has this many masks. There is one group, and a second one where a chain is likely
    enough to end at a second depth (`SECOND`). While masks are `useless` beside text, most steps have no masks.

    With ``drafts=auto`` the policy makes the choice with the most tokens per second, judged by the acceptance and the
    times of this job's own steps. The times differ from rank to rank, so each rank makes a proposal, and all follow the
    first rank's (`Lockstep`).

    Args:
        config: `drafts`, `branches`, where drafts come from, and `max_new_tokens` are read.
        share: the branches that run on this rank.
        blocks: whether masks draft in blocks (`Lookahead.blocks`).
        clock: returns seconds. On a CPU it should count this process's own time, which other programs hardly change.
        masks: whether the model has masks.
        adapted: whether rows of masks take longer than others, as on a CPU beside an adapter that acts on them alone.
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
        self.blocks, self.masks, self.text = blocks, masks and config.drafts_masks, config.drafts_text
        self.share, self.paths, self.clock = share, share.most(config.max_branches), clock
        self.causal, self.auto = config.causal, config.drafts == "auto"
        self.branches, self.most = int(config.branches > 0), config.max_drafts
        fixed = Choice(config.max_drafts * config.causal * self.masks, 1, self.branches)
        self.choice = self.first(0) if self.auto else fixed
        # `acceptance` counts chains that masks helped to draft. `bare` expects, from the drafts' chances, what text
        # alone would bring, even while text does not draft; so it shows when the table becomes useful.
        self.acceptance, self.bare = Acceptance(config.max_drafts), Acceptance(config.max_drafts, HOPE * self.text)
        self.gain = [1.0, 1.0]  # sequence steps with branches beside the chain, and drafts that the branches won
        self.times, self.adapted = TimesByKind(), adapted
        self.mask_cost = 1.0  # how many times as long a row of masks takes as `times` say
        self.lengths = [1.0, float(config.max_new_tokens)]  # answers that ended, and their tokens; begins with one
        self.worth = LEAST  # `Choice.worth` of this rank's next proposal
        self.mask_rows = self.from_masks = 0  # rows of masks, at most, and how many drafts from masks were accepted
        self.steps = 0
        self.ranked: list[Choice] = []  # the best first
        self.speed: dict[Choice, float] = {}  # expected tokens per second of each choice
        self.began: float | None = None  # when the last step began
        self.rows = 0  # of that step
        self.kind = Kind()
        self.sequences = 1  # how many the last ranking was for
        self.chosen: dict[int, int] = {}  # steps by the masks of their groups

    def first(self, step: int) -> Choice:
        """Return the choice for one of a job's first steps."""
        return FIRST[step]._replace(branches=self.branches) if self.masks else Choice(0, 1, self.branches)

    def lookahead(self, ends: NDArray[np.float64] | None = None) -> Lookahead:
        """Return how far the next step looks ahead, by `choice`.

        Args:
            ends: ``[S, D]`` probabilities that each sequence's chain ends at each depth; None: not known.
        """
        masks, groups, branches, _, _ = self.choice
        if self.text and not self.auto and self.useless() and sum(self.chosen.values()) % EXPLORE:
            masks = 0
        most = None if branches >= self.branches else 1
        if ends is not None and masks:
            has_group = np.zeros(ends.shape, bool)
            likely = np.argsort(-ends, 1, kind="stable")
            np.put_along_axis(has_group, likely[:, :groups], True, 1)
            if not self.auto:  # auto knows what a group costs
                second = likely[:, 1:2]
                np.put_along_axis(has_group, second, np.take_along_axis(ends, second, 1) >= SECOND, 1)
            return Lookahead(masks, (), self.blocks, has_group, most)
        if groups == 1:  # also of masked models, whose steps need no choice
            return Lookahead(masks, (), self.blocks, None, most)
        of_chain = self.acceptance.ends(masks)
        depths = sorted(range(masks), key=lambda depth: -of_chain[depth])[: groups - 1]
        return Lookahead(masks, tuple(depths), self.blocks, None, most)

    def useless(self) -> bool:
        """Return whether masks bring next to no accepted drafts for their rows, as where masks were never trained."""
        return self.mask_rows > TRIAL and 1000 * self.from_masks < LEAST * self.mask_rows

    def foresees(self) -> bool:
        """Return whether to work out in this step what text would bring, even if text does not draft."""
        return self.auto and self.reconsiders()

    def reconsiders(self) -> bool:
        """Return whether all choices are compared again in this step."""
        return self.steps % (RECONSIDER if self.steps < SETTLED else RARELY) == 0

    def expect(self, ends: NDArray[np.float64], drafts: Ints, room: Ints) -> None:
        """Count what text alone is expected to bring in this step; the arguments are those of `Acceptance.expect`."""
        self.bare.expect(ends, drafts, room)

    def start(self) -> None:
        """Begin a generation, whose first step has none before it to be measured."""
        self.began = None

    def count(self, accepted_from: Mapping[int, int]) -> None:
        """Count the accepted drafts of a step, which are given by source."""
        self.from_masks += accepted_from.get(MASKS, 0)

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
            groups = running if ahead.has_group is None else ahead.has_group[running]
            self.mask_rows += ahead.masks * int(groups.sum())
        if self.auto:
            now = self.clock()
            if self.began is not None and not chunk:
                self.times.measured(self.rows, now - self.began, self.kind)
            self.began, self.kind = now, self.kind_of(ahead.masks, self.choice.text)

    def stepped(
        self,
        before: HostState,
        after: HostState,
        choice: Choice,
        rows: int,
        masks: Ints | None,
        accepted_with: Ints | None,
    ) -> None:
        """Count the accepted drafts of a step, and take `choice`, which all ranks follow, for the next one.

        Args:
            before, after: what the host knew before the step and knows after it.
            choice: of the next step.
            rows: of the step's forward on this rank.
            masks: ``[S]`` for how many places of each chain masks had predicted a token; None: for all drafts.
            accepted_with: as in `Winner`.
        """
        self.choice, self.rows = choice, rows
        if not self.causal:
            return
        running = (before.done == 0) & (after.done == 0)  # a text that ends accepts nothing after its end
        drafted = running & ((before.drafts > 0) if masks is None else (masks > 0))
        if drafted.any():
            most = before.drafts if masks is None else masks  # drafts of text further on say nothing about masks
            drafts, accepted = (np.minimum(x, most)[drafted] for x in (before.drafts, after.accepted))
            self.acceptance.count(drafts, accepted, most[drafted])
        if accepted_with is not None and (branched := running & (before.branches > 1)).any():
            of_branches = accepted_with[branched]
            won = (of_branches[:, -1] - of_branches[:, 0]).sum()
            self.gain = [DECAY * self.gain[0] + branched.sum(), DECAY * self.gain[1] + won]
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
        """Return a choice of another kind of step if it is time to measure that kind: each in turn, if several are.

        If possible it is the best choice with only its kind changed, otherwise the best choice of that kind. One step
        would not do: a step's masks draft for the step after it.
        """
        rare = SELDOM * EXPLORE
        begun = [first for first in BURSTS if first <= self.steps < first + BURST]
        if not self.ranked or not (begun or (self.steps > rare and self.steps % rare < BURST)):
            return None
        best = self.ranked[0]
        least = NEAR * self.speed[best] * (self.steps >= BURSTS[0] + BURST)
        kinds = {self.kind_of(best.masks, best.text): best}
        alike = [best._replace(text=1 - best.text)] if self.text else []
        for choice in (*alike, *self.ranked):
            if self.speed[choice] >= least:
                kinds.setdefault(self.kind_of(choice.masks, choice.text), choice)
        others = list(kinds.values())[1:]
        turn = len([first for first in BURSTS if first <= self.steps]) + self.steps // rare
        return others[turn % len(others)] if others else None

    def rank(self, sequences: int) -> None:
        """Rank all choices anew. The best one so far stays first unless another is faster by more than noise."""
        self.times.fit()
        self.sequences = sequences
        self.speed = speed = {choice: self.tokens_a_second(choice, sequences) for choice in self.choices()}
        best = self.ranked[0] if self.ranked else None
        self.ranked = sorted(speed, key=lambda choice: -speed[choice] * (1 + HOLD * (choice == best)))
        if self.text:  # a row must bring as many tokens as its time would bring otherwise
            worth = 1000 * self.times.of(self.kind_of(0, 1)).line[1] * max(speed.values())
            self.worth = min(max(int(self.worth + worth) // 2, LEAST), MOST_WORTH)

    def kind_of(self, masks: float, text: int) -> Kind:
        """Return the kind of a step with `masks` masks, in which text drafts if `text` is 1."""
        return Kind(self.adapted and masks > 0, bool(text and self.text))

    def choices(self) -> list[Choice]:
        """Return all choices: no masks, one group of masks, two, or groups for a quarter, half or all of the depths."""
        counts = {
            masks: {1, 2, (masks + 1) // 4, (masks + 1) // 2, masks + 1} if masks else {1}
            for masks in (GROUP_SIZES if self.masks else GROUP_SIZES[:1])
        }
        return [
            Choice(m, g, branches, text)
            for m, groups in counts.items()
            for g in sorted(groups)
            for branches in range(self.branches + 1)
            for text in range(self.text + 1)
            if 1 <= g <= m + 1
        ]

    def tokens_a_second(self, choice: Choice, sequences: int) -> float:
        """Return the expected tokens per second of `sequences` sequences if every step followed `choice`.

        In some steps, masks helped to draft the chain. In the others, the *bare* steps, the chain is from text alone,
        or empty. Masks help if the chain of the step before ended at a token with a group. The first step of an answer
        is bare. The last one has no masks, and brings at most as many tokens as a chain.
        """
        masks, groups, branches, text, _ = choice
        text *= self.text
        branches *= self.branches
        ends, of_bare = self.acceptance.ends(masks), self.bare.ends(self.most * text)
        stay, enter = (covered(x, groups) * (masks > 0) for x in (ends, of_bare))
        gain = self.gain[1] / self.gain[0] * branches
        brought = 1 + sum(depth * p for depth, p in enumerate(ends)) * (masks > 0) + gain
        of_text = 1 + sum(depth * p for depth, p in enumerate(of_bare)) + gain
        share = enter / (1 - stay + enter) if enter else 0.0  # of the steps with masks' drafts
        mean = share * brought + (1 - share) * of_text
        length = self.lengths[1] / self.lengths[0]
        rounds = (length - of_text) / mean + (1 - 1 / mean) / 2
        of_groups = groups * (masks + Lookahead(masks, (), self.blocks).lead * (masks > 0))
        drafts, of_bare_drafts = self.acceptance.length(masks), self.bare.length(self.most * text)

        def seconds(drafts: float, masks_after: float) -> float:
            masks = masks_after * self.mask_cost
            return self.times.of(self.kind_of(masks_after, text)).expected(
                sequences * (1 + drafts + masks + branches * self.paths * (drafts + masks / groups))
            )

        bare, last = seconds(of_bare_drafts, of_groups), seconds(share * drafts + (1 - share) * of_bare_drafts, 0)
        step = share * seconds(drafts, of_groups) + (1 - share) * bare
        total = bare + min(max(rounds, 0), 1) * last + max(rounds - 1, 0) * step
        return sequences * length / total


def covered(ends: list[float], groups: int) -> float:
    """Return the probability that a chain ends at a token with a group, if `groups` stand where it likeliest ends."""
    return sum(sorted(ends, reverse=True)[:groups])
