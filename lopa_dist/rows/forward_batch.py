"""The packed rows of one forward on one rank: what layout hands to the model.

``[G]`` is a segment, ``[R]`` a row, ``[R']`` a row with padding, ``[S]`` a sequence and ``[H]`` a prediction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from lopa_dist.ragged import Ints, ragged_arange
from lopa_dist.rows.prefill import Prefill
from lopa_dist.rows.share import Share
from lopa_dist.staging import to_device


@dataclass
class RowTable:
    """The rows and what they see. They lie in segments: first the prompts', then the windows'.

    A window's segment belongs to a sequence and a branch; for prompts see `rows.prefill`. A segment's rows see the
    first `shared` tokens of their sequence in the pool, the first `hi` rows of their own segment and, if there is a
    `tail`, a second range of cached tokens, which follow the segment.

    Rows of a segment are in the order of positions. In a window's segment, further rows may follow: see `ExtraRows`.
    """

    sequence: Ints  # [G] sequence of each segment
    branch: Ints  # [G]; -1 for prompts
    start: Ints  # [G] its first row among the packed ones
    rows: Ints  # [G] its number of rows
    shared: Ints  # [G] tokens of its sequence before it, in the pool, which it sees
    first: Ints  # [G] position of its first row, relative to the prompt's end
    hi: Ints  # [R] how many of its segment's first rows a row sees
    depth: Ints  # [R] drafts that a row takes as filled: it sees no row whose `DraftRows.until` is not above it
    tail: tuple[Ints, Ints] | None = None  # [G] a second cached range that it sees, after it: first token and number
    seen: Ints | None = None  # [R] cached tokens that each row sees; None: all `shared` ones of its segment
    place: Ints | None = None  # [R] token of its sequence whose K/V a row writes into the pool; -1: into scratch


@dataclass
class DraftRows:
    """The rows that verify drafts (`rows.draft_rows`)."""

    until: Tensor  # [R] the depth from which on rows of the same segment do not see this row
    cell: Tensor  # [n] of each verification record: (m - 1) x sequence + the draft's number in its branch
    # [S] position that the first row that sees drafts predicts; those before it predict the same without drafts
    predicts_from: Tensor


@dataclass
class Predictions:
    """Which rows predict, and what."""

    rows: Tensor  # [H] rows whose prediction is wanted; negative: stored hidden states (`SharedPrefixes`)
    keys: Tensor | None  # [H] keys of the random numbers; None if none are drawn
    where: Tensor | None = None  # [h] of each wanted position: W x sequence + offset in `State.window`


@dataclass
class Heads:
    """The rows that predict, and where their predictions go in this rank's records, ``[branches, columns]``."""

    predict: Callable[[], Predictions]  # makes `predictions`
    slots: Tensor  # [H] in the records, flattened
    sequence: Ints  # [H] whose position is predicted
    branches: int  # on this rank
    columns: int  # predictions wanted of each branch: for masked positions, then those of rows after windows

    @cached_property
    def predictions(self) -> Predictions:
        """Which rows predict: worked out when first asked for, while a GPU runs the layers, which do not need it."""
        return self.predict()

    def no_records(self, size: int) -> Tensor:
        """Return records of `size` numbers each, ``[branches, columns, size]`` int32, which are all 0."""
        return torch.zeros(self.branches, self.columns, size, dtype=torch.int32, device=self.slots.device)


@dataclass
class Windows:
    """Where windows lie, and where in ``[S, K, W]`` their predictions belong."""

    begin: Ints  # [S] position of the first row of each sequence's windows
    stop: Ints  # [S] position after their last row
    width: int  # W
    of_commit: Tensor | None  # [S] bool, from `structure.record_of_commit`; None: false for all


@dataclass
class ChainCells:
    """Where the predictions of a causal model's forward belong in ``[S, D, 1 + n]``.

    For each of the D depths of a sequence's chain: the prediction of the draft there (of the pending token at depth 0),
    and those of the n masks after it.
    """

    cells: Tensor  # [A] of what every branch rank runs: chains and their groups
    path_cells: Tensor  # [B] of a path's drafts and masks, of all sequences that have paths; the same for all branches
    depths: int  # D
    group: int  # n


@dataclass
class ForwardBatch:
    """One forward's packed rows on one rank. `windows` or `chains` says what its predictions are for."""

    table: RowTable
    tokens: Tensor  # [R'] ids, R' = `padded` (R)
    positions: Tensor  # [R'] places
    heads: Heads
    share: Share  # of the branches that run on this rank
    computed: Ints  # [S] rows of each sequence on all branch ranks together, without prompts' own segments
    prefill: Prefill | None  # None if there are no prompts
    windows: Windows | None = None  # of a masked model
    chains: ChainCells | None = None  # of a causal model
    drafts: DraftRows | None = None  # the rows that verify drafts after windows; None if there are none

    def must_be_finite(self) -> Tensor | None:
        """Return which packed rows follow windows, as drafts' do, or are padding, ``[R']`` bool.

        None: no row follows a window. If there are no windows, all rows are returned: a token's K/V must be the
        same whether it is verified as a draft or alone.
        """
        table, windows = self.table, self.windows
        if windows is None:
            return torch.ones_like(self.tokens, dtype=torch.bool)
        extra = np.where(table.branch < 0, 0, table.rows - (windows.stop - windows.begin)[table.sequence])  # [G]
        if not extra.any():
            return None
        found = np.ones(len(self.tokens), bool)
        found[: len(table.hi)] = ragged_arange(table.rows) >= (table.rows - extra).repeat(table.rows)
        return to_device(found, self.tokens.device)
