"""How far a forward of a causal model looks ahead."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lopa_dist.ragged import Ints


@dataclass(frozen=True)
class Lookahead:
    """How far a forward looks ahead; no text depends on it."""

    masks: int  # of a group
    depths: tuple[int, ...] = ()  # depths of the chain with a group, besides the last one
    blocks: bool = False  # whether a group's masks predict their own places (`ModelConfig.block_drafts`)
    has_group: NDArray[np.bool_] | None = None  # [S, D'] which depths of each chain have a group, instead of `depths`
    most_branches: int | None = None  # the most branches that run, the chain included; None: all

    def take(self, slots: Ints) -> Lookahead:
        """Return the same for some slots."""
        return self if self.has_group is None else replace(self, has_group=self.has_group[slots])

    @property
    def lead(self) -> int:
        """Return how many rows of a group predict nothing."""
        return lead_rows(self.blocks)


def lead_rows(blocks: bool) -> int:
    """Return how many rows of a group predict nothing; they stand in front of the masks whose predictions count.

    `blocks` is whether the masks predict their own places.
    """
    return 2 * blocks
