"""What a rule of decoding needs of its rows: which ones a forward has, where their records go, which K/V are kept."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lopa_dist.decode.config import DecodeConfig
from lopa_dist.decode.state import HostState, Records, State
from lopa_dist.ragged import Ints
from lopa_dist.rows.forward_batch import ForwardBatch
from lopa_dist.rows.lookahead import Lookahead
from lopa_dist.rows.prefill import SharedPrefixes
from lopa_dist.rows.share import Share

Structures: TypeAlias = dict[tuple[object, ...], Any]
"""A row maker's cache of layouts from earlier steps, by the values from which they follow."""


def keep(structures: Structures, key: tuple[object, ...], made: Any, most: int) -> None:
    """Cache what was made for a step; if `most` entries are there already, they are dropped."""
    if len(structures) >= most:
        structures.clear()
    structures[key] = made


class Kept(NamedTuple):
    """The rows whose K/V are kept for good: the first ones of a segment of each sequence's winner."""

    place: Ints  # [S] of the token that the segment's first row holds
    rows: Ints  # [S] how many rows
    anywhere: NDArray[np.bool_]  # [S] whether every branch has the same, so that each rank keeps what it computed


class RowMaker(Protocol):
    """Lays out the rows of a rule's forwards; all ranks of a branch group make the same calls."""

    @property
    def everywhere(self) -> int:
        """How many branches run on every rank: the first ones (`Share`)."""

    @property
    def in_place(self) -> bool:
        """Whether rows write tokens' K/V to their place in the pool; each row then has its own `RowTable.seen`."""

    def layout(
        self,
        state: State,
        host: HostState,
        share: Share,
        prefixes: SharedPrefixes | None,
        lookahead: Lookahead,
        structures: Structures,
    ) -> ForwardBatch:
        """Lay out this rank's share of the next forward.

        Args:
            state, host: the state and its host copy, of the same step.
            share: the branches that run on this rank.
            prefixes: what prompts share; None if no prompt waits.
            lookahead: how far a causal model looks ahead, the same on all ranks.
            structures: cached from earlier steps with the same slots; this step's may be added.
        """

    def unpack(self, state: State, batch: ForwardBatch, gathered: Tensor) -> Records:
        """Return all ranks' records by sequence and branch, as the rule's `verify` reads them.

        Args:
            state, batch: of this step.
            gathered: ``[ranks, branches, columns, n]`` int32: token, bits of probability and confidence, and so
                on (`Records`).
        """

    def kept(self, config: DecodeConfig, batch: ForwardBatch, before: HostState, after: HostState) -> Kept | None:
        """Return which rows of the last forward are kept; None if none is.

        Args:
            config: of the step.
            batch: the forward's rows.
            before, after: what the host knew when it laid out that forward, and what it knows now.
        """

    def in_step(self, state: State, host: HostState, lookahead: Lookahead, share: Share) -> Ints:
        """Return the rows of each sequence in a step on the rank that has the most of them, ``[S]``.

        Rows of prompts that are prefilled in segments of their own are not counted.
        """

    def usual(self, config: DecodeConfig) -> int:
        """Return how many rows a sequence usually has in a step, all its branches and drafts included."""

    def of_branch(self, config: DecodeConfig, window: int) -> int:
        """Return the most rows of a branch whose window has `window` rows, those after the window included."""

    def apart(self, config: DecodeConfig, branches: int) -> int:
        """Return the most rows of a sequence in a forward on one rank that are neither its prompt's nor in windows.

        Args:
            config: of the step.
            branches: of the sequence on this rank.
        """

    def predictions(self, config: DecodeConfig, branches: int, window: int) -> int:
        """Return the most predictions that a sequence usually has in a forward on one rank.

        Args:
            config: of the step.
            branches: of the sequence on this rank.
            window: the most rows that a window usually has.
        """

    def groups(self, config: DecodeConfig) -> int:
        """Return the most segments that a sequence has besides its prompt's and its branches'."""
