"""Rows that verify several drafts in one branch.

A branch verifies the drafts d_1 .. d_m, at positions p_1 .. p_m. Its own record says what it predicts at p_1. For a
later position, the drafts before it would have to be filled in the branch. Instead, the branch gets two more rows for
each draft:

- the *token row* T_i (i < m): the token of d_i at position p_i;
- the *verification row* C_i (i > 1): the row that predicts position p_i, in the context of d_1 .. d_{i-1}. With the
  logit shift it is a copy of the row at p_i - 1, with the token that this position has then; without the shift it is a
  mask at p_i.

These rows follow the window's rows, and rows of other kinds, in this order:

    window rows, in the order of positions | T_1 ... T_{m-1} | C_2 ... C_m

The window's rows do not see the drafts. T_i sees the window without the masks at p_1 .. p_i, and T_1 .. T_i. C_i sees
what T_{i-1} sees; no row sees C_i. So drafts see one another as if they were filled, but they see the rest of the
window as it is without them. That is an approximation (docs/lopa-step.md, "Several drafts in one branch").

Two numbers for each row express this. Its `depth` is how many drafts it takes as filled: i for T_i and C_{i+1}, 0 for
the window's rows. Its `until` is the depth from which on rows do not see it: i for the mask at p_i. With block-causal
windows all drafts of a sequence lie in its first open block, and rows of later blocks are seen at depth 0 only.

All branches of a sequence have rows for the same number of drafts, so all have equal shapes, on whichever rank they
run. If a branch has fewer drafts, positions that it has filled follow them in `State.chain`. Their rows'
predictions are not used, and real drafts see the tokens there like any others.

`VerifiedDrafts` has its functions in the order in which a step calls them: `rows` counts the rows, `find` finds them
among all others (its result is cached), `offsets` adds where the windows are now, and `place` fills the rows in, on the
device. After the forward, `unpack` reads the records.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lopa_dist.decode.config import DecodeConfig
from lopa_dist.decode.state import HostState, Records, State
from lopa_dist.ragged import UNBOUNDED, Ints, ragged_arange, ranges
from lopa_dist.rows.forward_batch import DraftRows, ForwardBatch
from lopa_dist.rows.structure import DraftOrigins, ExtraRows, Kind, Structure


def drafts_with_rows(config: DecodeConfig, host: HostState) -> Ints:
    """Return how many drafts of each sequence's branches have a verification row, ``[S]``: all but the first."""
    return np.maximum(np.minimum(host.drafts, config.drafts) - 1, 0) * (host.branches > 0)


class VerifiedDrafts(Kind):
    """The kind of rows that verify drafts. It must be the last kind: it takes the last records.

    Rows of drafts see the rows before them, unless these have an `until` of 1.
    """

    def rows(self, config: DecodeConfig, host: HostState) -> ExtraRows:
        """Return the rows of drafts: of each branch its token rows, then as many verification rows.

        What they hold follows from the drafts, so it is filled in on the device (`place`).
        """
        t = drafts_with_rows(config, host)  # [S] token rows, and as many verification rows
        depth = ragged_arange(2 * t) % t.repeat(2 * t) + 1  # for t = 3: 1 2 3 | 1 2 3
        return ExtraRows(
            count=2 * t, reported=t, own=depth, depth=depth, until=np.full_like(depth, UNBOUNDED),
            position=host.complete.repeat(2 * t),
        )  # fmt: skip

    def find(self, state: State, host: HostState, structure: Structure) -> None:
        """Set what the structure says about drafts, and what the device needs to fill in their rows, if there are any.

        This sets `drafts`, `indices` and, with block-causal windows, the `until` of rows after the drafts' block.

        A rank whose branches have no such rows needs this, too, because it unpacks the records of all ranks.

        [D] is a draft with a token row, T_i. It also stands for the next draft, which has a verification row, C_{i+1}.

        Args:
            state, host: of this step.
            structure: of all rows; changed in place.
        """
        config, m = state.config, state.config.drafts
        reported = drafts_with_rows(config, host)  # [S] verification records of each branch
        if not reported.any():
            return
        sequence, branch = structure.sequence, structure.branch
        t = reported[sequence] * (branch >= 0)  # [G] token rows, and as many verification rows: the segment's last rows
        segment, number = np.arange(len(t)).repeat(t), ragged_arange(t)  # [D]
        token_row = (structure.start + structure.rows - 2 * t)[segment] + number
        verification_row = token_row + t[segment]

        if config.scope.by_blocks:  # rows after the drafts' block
            block_end = (host.complete % config.block_size + config.block_size)[sequence].repeat(structure.rows)
            later = structure.row_position[: len(block_end)] >= block_end
            structure.until[later & (structure.depth == 0)] = 1

        # where `State.chain` has what T_i holds (d_i) and what C_{i+1} holds (the token that verifies d_{i+1})
        draft = ((sequence * config.max_branches + branch) * m)[segment] + number  # [D] d_i, among all S x K x m
        tokens, verifying = (
            state.chain_token.numel(),
            2 * state.chain_token.numel(),
        )  # where they begin, after the positions
        shift = np.repeat([0, int(state.vocabulary.shift)], len(segment))
        predicts_from = sees_drafts_from(config, host, structure) + int(state.vocabulary.shift)
        structure.drafts = DraftOrigins(segment, np.tile(sequence[segment], 2), shift, predicts_from)
        structure.indices |= {
            # of token rows, then of verification rows: [2 D] tokens, [2 D] positions
            "chain_cell": np.concatenate([tokens + draft, verifying + draft + 1, draft, draft + 1]),
            "draft_row": np.append(token_row, verification_row),  # [2 D]
            "draft_depth": number + 1,  # [D]
            "until": structure.until,  # [R] without the masks that drafts replace
            "draft_cell": ranges(np.arange(len(reported)) * (m - 1), reported),  # `DraftRows.cell`
        }

    def offsets(
        self, structure: Structure, host: HostState, block_begin: Ints, row_minus_position: Ints
    ) -> dict[str, Ints]:
        """See `Kind`."""
        origins = structure.drafts
        if origins is None:
            return {}
        return {
            "draft_offset": host.prompt[origins.sequence] - origins.shift,  # [2 D] a row's position minus its draft's
            "mask_offset": row_minus_position[origins.segment],  # [D] the mask's row minus the draft's position
            "predicts_from": origins.predicts_from + block_begin,
        }

    def place(
        self, state: State, structure: Structure, index: dict[str, Tensor], tokens: Tensor, positions: Tensor
    ) -> DraftRows | None:
        """See `Kind`."""
        if structure.drafts is None:
            return None
        row, depth = index["draft_row"], index["draft_depth"]
        token, position = state.chain.view(-1).index_select(0, index["chain_cell"]).view(2, -1)  # [2 D] each
        tokens.index_copy_(0, row, token)
        positions.index_copy_(0, row, (position + index["draft_offset"]).clamp_(min=0))
        until = index["until"].index_copy(0, position[: len(depth)] + index["mask_offset"], depth)
        return DraftRows(until, index["draft_cell"], index["predicts_from"])

    def unpack(self, state: State, batch: ForwardBatch, records: Records, parts: Tensor) -> Records:
        """Add what the forward predicts for each draft in the context of the drafts before it, ``[S, K x m]``.

        The first draft of a branch takes the branch's own record. So do drafts whose predicting row sees no drafts,
        because no other draft can change what that row predicts. The others take the record of their verification row.

        Args: as in `Kind`; the records of verification rows come last in `parts`.
        """
        packed = records.packed
        m, slots, width = state.config.drafts, state.slots, packed.shape[-1]
        position = state.chain_position.view(slots, -1, m)  # [S, K, m]
        offset = (position - state.complete[:, None, None]).clamp(
            0, width - 1
        )  # in range also if a branch has no draft
        size = len(packed)
        drafts = packed.gather(3, offset.expand(size, -1, -1, -1))
        if batch.drafts is not None:
            verified = parts[:, :, -len(batch.drafts.cell) :]
            dense = verified.new_zeros(size, verified.shape[1], slots * (m - 1))
            dense.index_copy_(2, batch.drafts.cell, verified)
            rows = dense.view(size, -1, slots, m - 1).transpose(1, 2)  # [size, S, K, m - 1]
            sees_drafts = position[..., 1:] >= batch.drafts.predicts_from[:, None, None]
            after_first = drafts[..., 1:]
            torch.where(sees_drafts, rows, after_first, out=after_first)
        return Records(packed, Records(drafts.flatten(2)))


def sees_drafts_from(config: DecodeConfig, host: HostState, structure: Structure) -> Ints:
    """Return the first position from which a sequence's rows see drafts, ``[S]``, counted from `block_begins`.

    Drafts that earlier rows predict are verified by the branch's own records (`VerifiedDrafts.unpack`).

    Args:
        config, host: of this step.
        structure: of all rows.
    """
    if config.scope.by_blocks:  # the block of the drafts
        return np.maximum(structure.begin, host.complete % config.block_size)
    return structure.begin
