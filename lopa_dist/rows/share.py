"""Which branch rank runs which branch: Branch Parallelism (LoPA, arXiv 2512.16229, section 4)."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from lopa_dist.ragged import Ints

IntOrInts = TypeVar("IntOrInts", int, Ints)


class Share(NamedTuple):
    """One rank's share of the branches of every sequence.

    The first `everywhere` branches run on every rank. The others, the *shared* ones, are dealt out in turn: the first
    of them to rank 0, the next to rank 1, and so on. A rank's shared branches have the slots 0, 1, ... of its records.
    """

    rank: int = 0  # of the branch group
    ranks: int = 1
    everywhere: int = 0

    def owner(self, branch: Ints) -> Ints:
        """Return the rank that runs a shared branch."""
        return (branch - self.everywhere) % self.ranks

    def slot(self, branch: Ints) -> Ints:
        """Return the slot of a shared branch on the rank that runs it."""
        return (branch - self.everywhere) // self.ranks

    def mine(self, slot: Ints) -> Ints:
        """Return the branches in some of this rank's slots."""
        return self.everywhere + self.rank + self.ranks * slot

    def owned(self, branches: Ints) -> Ints:
        """Return how many shared branches this rank runs for sequences with `branches` branches in all, ``[S]``."""
        return np.maximum(-(-(branches - self.everywhere - self.rank) // self.ranks), 0)

    def most(self, branches: IntOrInts) -> IntOrInts:
        """Return the most shared branches that any rank runs, if there are `branches` branches in all."""
        return -(-(branches - self.everywhere) // self.ranks)

    def at_once(self, branches: int) -> int:
        """Return the most branches that any rank runs, of `branches` in all: those of every rank, and shared ones."""
        return self.everywhere + self.most(branches)

    def by_branch(self, records: Tensor, branches: int) -> Tensor:
        """Return the records of shared branches in the branches' order, ``[branches - everywhere, ...]``.

        Args:
            records: ``[ranks, slots, ...]`` of all ranks.
            branches: in all.
        """
        return records.transpose(0, 1).flatten(0, 1)[: branches - self.everywhere]


ALONE = Share()
"""The share of a rank that runs every branch."""
