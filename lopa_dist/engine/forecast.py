"""How many tokens per second each choice of masks, groups and branches is expected to bring."""

from __future__ import annotations

from typing import NamedTuple

from lopa_dist.decode.config import DecodeConfig
from lopa_dist.engine.outcomes import LEAST_SHARE, Outcomes
from lopa_dist.engine.step_times import StepKind, TimesByKind
from lopa_dist.rows.lookahead import lead_rows
from lopa_dist.rows.share import ALONE, Share

GROUP_SIZES = (0, 1, 2, 3, 4, 6, 8, 12, 16)  # sizes of a group of masks that auto may choose
LEAST_WORTH, MOST_WORTH = round(1000 * LEAST_SHARE), 900  # bounds of `Choice.worth`


class Choice(NamedTuple):
    """How far a step looks ahead."""

    masks: int  # of a group
    groups: int
    branches: int = 0  # whether branches run beside the chain
    text: int = 1  # whether text drafts, where it may; without it, a chain goes no further than masks predicted
    worth: int = LEAST_WORTH  # thousandths: the least probability of being reached and right that is worth a row


class Forecast:
    """Works out the speed of choices from what was accepted so far and from the times of this job's own steps.

    Args:
        config: `drafts`, `branches`, where drafts come from, and `max_new_tokens` are read.
        share: the branches that run on this rank.
        blocks: whether masks draft in blocks (`Lookahead.blocks`).
        masks: whether the model has masks.
        adapted: whether rows of masks take longer than others, as on a CPU beside an adapter that acts on them alone.
    """

    def __init__(
        self,
        config: DecodeConfig,
        share: Share = ALONE,
        blocks: bool = False,
        masks: bool = True,
        adapted: bool = False,
    ) -> None:
        self.blocks, self.adapted = blocks, adapted
        self.masks, self.text = masks and config.drafts_masks, config.drafts_text
        self.branches, self.paths = int(config.branches > 0), share.most(config.max_branches)
        self.most = config.max_drafts
        self.outcomes = Outcomes(config.max_drafts, config.max_new_tokens, self.text)
        self.times = TimesByKind()
        self.mask_cost = 1.0  # how many times as long a row of masks takes as `times` say

    def kind_of(self, masks: float, text: int) -> StepKind:
        """Return the kind of a step with `masks` masks, in which text drafts if `text` is 1."""
        return StepKind(self.adapted and masks > 0, bool(text and self.text))

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

    def fastest(self, sequences: int) -> float:
        """Return the expected tokens per second of `sequences` sequences with the best choice."""
        return max(self.tokens_a_second(choice, sequences) for choice in self.choices())

    def tokens_a_second(self, choice: Choice, sequences: int) -> float:
        """Return the expected tokens per second of `sequences` sequences if every step followed `choice`.

        In some steps, masks helped to draft the chain. In the others, the *bare* steps, the chain is from text alone,
        or empty. Masks help if the chain of the step before ended at a token with a group. The first step of an answer
        is bare. The last one has no masks, and brings at most as many tokens as a chain.
        """
        masks, groups, branches, text, _ = choice
        text *= self.text
        branches *= self.branches
        helped, bare, length = self.outcomes.helped, self.outcomes.bare, self.outcomes.length
        ends, of_bare = helped.ends(masks), bare.ends(self.most * text)
        stay, enter = (covered(x, groups) * (masks > 0) for x in (ends, of_bare))
        won = self.outcomes.by_branches * branches
        brought = 1 + sum(depth * p for depth, p in enumerate(ends)) * (masks > 0) + won
        of_text = 1 + sum(depth * p for depth, p in enumerate(of_bare)) + won
        share = enter / (1 - stay + enter) if enter else 0.0  # of the steps with masks' drafts
        mean = share * brought + (1 - share) * of_text
        # the steps after the first one; of the last one's tokens, (mean - 1) / 2 are beyond the end on average
        later = (length - of_text) / mean + (1 - 1 / mean) / 2
        of_groups = groups * (masks + lead_rows(self.blocks) * (masks > 0))
        drafts, of_bare_drafts = helped.length(masks), bare.length(self.most * text)

        def seconds(drafts: float, masks_after: float) -> float:
            masks = masks_after * self.mask_cost
            return self.times.of(self.kind_of(masks_after, text)).expected(
                sequences * (1 + drafts + masks + branches * self.paths * (drafts + masks / groups))
            )

        first, last = seconds(of_bare_drafts, of_groups), seconds(share * drafts + (1 - share) * of_bare_drafts, 0)
        between = share * seconds(drafts, of_groups) + (1 - share) * first
        total = first + min(max(later, 0), 1) * last + max(later - 1, 0) * between
        return sequences * length / total


def covered(ends: list[float], groups: int) -> float:
    """Return the probability that a chain ends at a token with a group, if `groups` stand where it likeliest ends."""
    return sum(sorted(ends, reverse=True)[:groups])
