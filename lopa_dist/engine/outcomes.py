"""What the steps of a replica have brought so far: accepted drafts, and how long answers were."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from lopa_dist.decode.state import HostState
from lopa_dist.engine.acceptance import DECAY, HOPE, Acceptance
from lopa_dist.engine.draft_kinds import MASKS
from lopa_dist.ragged import Ints

FEWEST_ROWS = 1024  # rows of masks that are run before masks may be found useless
LEAST_SHARE = 0.02  # accepted drafts per row of masks, below which masks are useless


class Outcomes:
    """Counts what steps bring, older ones less.

    Args:
        drafts: the most drafts of a chain.
        new_tokens: the most tokens of an answer.
        text: whether text drafts.
    """

    def __init__(self, drafts: int, new_tokens: int, text: bool) -> None:
        self.helped = Acceptance(drafts)  # chains that masks helped to draft
        # chains drafted without masks, counted by the drafter's own probabilities. They are counted even while text
        # does not draft, to show when drafting from text would pay
        self.bare = Acceptance(drafts, HOPE * text)
        self.branched = [1.0, 1.0]  # sequence steps with branches beside the chain, and drafts that the branches won
        self.answers = [1.0, float(new_tokens)]  # answers that ended, and their tokens; begins with one
        self.mask_rows = self.from_masks = 0  # rows of masks, at most, and how many drafts from masks were accepted

    @property
    def by_branches(self) -> float:
        """How many more drafts a step of a sequence brings with branches than with its chain alone."""
        return self.branched[1] / self.branched[0]

    @property
    def length(self) -> float:
        """How many tokens an answer has on average."""
        return self.answers[1] / self.answers[0]

    def useless(self) -> bool:
        """Return whether masks bring next to no accepted drafts for their rows, as where masks were never trained."""
        return self.mask_rows > FEWEST_ROWS and self.from_masks < LEAST_SHARE * self.mask_rows

    def expect(self, ends: NDArray[np.float64], drafts: Ints, room: Ints) -> None:
        """Count what text alone is expected to bring in a step; the arguments are those of `Acceptance.expect`."""
        self.bare.expect(ends, drafts, room)

    def accepted(self, accepted_from: Mapping[int, int]) -> None:
        """Count the accepted drafts of a step, which are given by source."""
        self.from_masks += accepted_from.get(MASKS, 0)

    def ran(self, masks: int) -> None:
        """Count the rows of masks of a step that begins."""
        self.mask_rows += masks

    def stepped(self, before: HostState, after: HostState, masks: Ints | None, accepted_with: Ints | None) -> None:
        """Count the accepted drafts of a step, what its branches won, and the answers that it ended.

        Args:
            before, after: what the host knew before the step and knows after it.
            masks: ``[S]`` for how many places of each chain masks had predicted a token; None: for all drafts.
            accepted_with: as in `Winner`.
        """
        running = (before.done == 0) & (after.done == 0)  # a text that ends accepts nothing after its end
        drafted = running & ((before.drafts > 0) if masks is None else (masks > 0))
        if drafted.any():
            most = before.drafts if masks is None else masks  # drafts of text further on say nothing about masks
            drafts, accepted = (np.minimum(x, most)[drafted] for x in (before.drafts, after.accepted))
            self.helped.count(drafts, accepted, most[drafted])
        if accepted_with is not None and (branched := running & (before.branches > 1)).any():
            of_branches = accepted_with[branched]
            won = (of_branches[:, -1] - of_branches[:, 0]).sum()
            self.branched = [DECAY * self.branched[0] + branched.sum(), DECAY * self.branched[1] + won]
        ended = (before.done == 0) & (after.done != 0)
        if ended.any():
            answers, tokens = int(ended.sum()), int((after.complete - after.known)[ended].sum())
            weight = DECAY**answers
            self.answers = [weight * self.answers[0] + answers, weight * self.answers[1] + tokens]
