"""Rows that verify several drafts in one branch.

A branch verifies the drafts d_1 .. d_m, at positions p_1 .. p_m. Its own record says what it predicts at p_1. For the
others the branch would have to be filled with the drafts before them. Instead it gets two more rows a draft:

- the *token row* T_i (i < m): the token of d_i at position p_i;
- the *verification row* C_i (i > 1): the row that predicts position p_i, in the context of d_1 .. d_{i-1}. With the
  logit shift it is a copy of the row at p_i - 1, with the token that this position has then; without the shift it is a
  mask at p_i.

The window's rows do not see the drafts. T_i sees the window without the masks M_1 .. M_i at p_1 .. p_i, and T_1 .. T_i.
C_i sees what T_{i-1} sees; no row sees C_i. So drafts see one another as if they were filled, but the rest of the
window as it was without them. That is an approximation, like a cache that is one step old (docs/architecture.md).

A segment's columns are ordered so that every row sees one interval of them:

    T_{m-1} ... T_1 | window rows without masks of drafts | M_m ... M_1 | window rows of later blocks | C_2 ... C_m

With t = m - 1 token rows and B window rows up to the end of what drafts see, window rows see [t, t + their number), and
T_i and C_{i+1} see [t - i, t - i + B): a window of constant length that slides to the left. With full windows B is the
whole window. With block-causal ones all drafts of a sequence lie in its first open block, and B ends with that block.

All branches of a sequence have rows for the same number of drafts, so that all have equal shapes, whatever rank runs
them, and whatever paths they are. Where a branch has fewer drafts, positions that it has filled stand behind them in
`State.chain`. Their rows' predictions are not used, and real drafts see the tokens there like any others.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lopa_dist.decode.config import DecodeConfig
from lopa_dist.decode.state import HostState, State
from lopa_dist.ragged import Ints, padded, ragged_arange, to_device
from lopa_dist.rows.forward_batch import DraftRows
from lopa_dist.rows.structure import DraftStructure, Structure


def drafts_with_rows(config: DecodeConfig, host: HostState) -> Ints:
    """Return how many drafts of each sequence's branches have a verification row, ``[S]``: all but the first."""
    return np.maximum(np.minimum(host.drafts, config.drafts) - 1, 0) * (host.branches > 0)


def rows_of_branch(config: DecodeConfig, host: HostState, begin: Ints, stop: Ints) -> Ints:
    """Return how many rows a branch of each sequence has in a forward, ``[S]``, its drafts' rows included.

    Args:
        config: `drafts` is read.
        host: as laid out for the forward.
        begin, stop: ``[S]`` what its window spans, from `row_span`.
    """
    return stop - begin + 2 * drafts_with_rows(config, host)


def add_draft_rows(state: State, host: HostState, structure: Structure, origin: Ints, extra: Ints, ranks: int) -> None:
    """Add rows for drafts to a structure, in the order that is described above.

    Args:
        state, host: of this step.
        structure: of the windows' rows; changed in place.
        origin: ``[S]`` what positions are counted from.
        extra: ``[S]`` from `drafts_with_rows`.
        ranks: of the branch group.
    """
    config, m = state.config, state.config.drafts
    sequence, start, rows, complete = structure.sequence, structure.start, structure.rows, host.complete - origin
    branch = np.maximum(structure.branch, 0)
    t = extra[sequence] * (structure.branch >= 0)  # [G]
    drafts = np.minimum(host.drafts[sequence], m) * (t > 0)  # [G] whose masks move
    packed_rows = rows + 2 * t
    packed_start = packed_rows.cumsum() - packed_rows
    seen = rows  # [G] window rows up to the end of what drafts see
    # a prediction that no draft can change needs no row (`DraftRows.begin`)
    begin = structure.begin
    if config.window_attention == "block_causal":
        seen = np.minimum(complete[sequence] + config.block_size - structure.first, rows)
        begin = np.maximum(begin, complete)
    elif config.prompt_attention != "joint":
        begin = np.maximum(begin, -origin)

    # which segment and which draft (from 0) of its branch: a token row, a verification row, and the mask of each draft
    segments, before = np.arange(len(rows)), packed_start + t
    of_token, token_draft = segments.repeat(t), ragged_arange(t)
    of_check, check_draft = of_token, token_draft + 1
    of_mask, mask_draft = segments.repeat(drafts), ragged_arange(drafts)
    token_row = before[of_token] - check_draft
    check_row = (before + rows)[of_check] + token_draft
    mask_row = (before + seen)[of_mask] - 1 - mask_draft

    # what each row sees of its segment; a verification row sees what the token row of the draft before sees
    lo, hi = np.zeros((2, int(packed_rows.sum())), np.int64)
    window_row = np.arange(len(structure.hi)) + (before - start).repeat(rows)
    lo[window_row] = t.repeat(rows)
    hi[window_row] = lo[window_row] + structure.hi
    lo[token_row] = lo[check_row] = t[of_token] - check_draft
    hi[token_row] = hi[check_row] = lo[token_row] + seen[of_token]

    # Masks of drafts move behind the other rows that drafts see, which therefore shift left by the number of such masks
    # before them. The device counts these across segments, so `moved` adds the masks of earlier segments back.
    moved = window_row + (drafts.cumsum() - drafts).repeat(rows)
    if config.window_attention == "block_causal":  # rows of later blocks stay where they are
        moved += (ragged_arange(rows) >= seen.repeat(rows)) * drafts.repeat(rows)

    # what is reported of the verification rows
    reported = structure.reported[of_check]
    column = structure.wanted + (extra.cumsum() - extra)[sequence[of_check]] + check_draft - 1
    slot = (branch[of_check] // ranks * structure.columns + column)[reported]

    of_all = np.concatenate([of_mask, of_token, of_check])
    draft = np.concatenate([mask_draft, token_draft, check_draft])
    structure.drafts = DraftStructure(start, begin, sequence[of_all], (len(of_mask), len(of_token), len(of_check)))
    structure.start, structure.rows, structure.lo, structure.hi = packed_start, packed_rows, lo, hi
    structure.head_sequence = np.append(structure.head_sequence, sequence[of_check][reported])
    structure.arrays |= {  # of drafts in the order of `DraftStructure.sequence`, or of one of its kinds
        "slot": np.append(structure.arrays["slot"], slot),
        "chain": (sequence * config.max_chain + branch * m)[of_all] + draft,  # each draft's cell in `State.chain`
        "moved": moved,
        "mask_row": mask_row,
        "mask_window": start[of_mask] - structure.first[of_mask],  # row in the order of positions = this + position
        "drafts_into": np.append(token_row, check_row),
        "reported": np.flatnonzero(reported),
        "check_head": check_row[reported],
        "where": (np.arange(len(extra)) * (m - 1)).repeat(extra) + ragged_arange(extra),
    }


def place_drafts(
    state: State,
    structure: Structure,
    on: dict[str, Tensor],
    tokens: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor, DraftRows]:
    """Scatter the rows of windows and of drafts into the packed order that is described above.

    Args:
        state: of this step.
        structure: of the forward, with rows of drafts.
        on: its arrays on the device, and the drafts' `mask_origin` and `draft_prompt`, and `begin`.
        tokens, positions: of the windows' rows, in the order of positions.

    Returns:
        Tokens and positions of all packed rows, and which rows belong to drafts.
    """
    drafts = structure.drafts
    assert drafts is not None
    shift, in_order = int(state.vocabulary.shift), len(on["moved"])
    position, token = state.chain.flatten(1).index_select(1, on["chain"])  # [D]
    _, token_position, check_position = (position + on["draft_prompt"]).split(drafts.kinds)

    # window rows
    drafted = position[: drafts.kinds[0]]
    masks = on["mask_window"] + drafted - on["mask_origin"]
    count = torch.zeros_like(on["moved"]).index_fill_(0, masks, 1).cumsum_(0)
    packed_row = (on["moved"] - count).index_copy_(0, masks, on["mask_row"])

    # verification rows: the row that predicts the draft's position, in the context of the drafts before it
    if shift:
        context = state.chain_context.view(-1).index_select(0, on["chain"][len(on["chain"]) - drafts.kinds[2] :])
    else:
        context = torch.full_like(check_position, state.vocabulary.mask_id)

    into = torch.cat([packed_row, on["drafts_into"]])
    token_rows = token.split(drafts.kinds)[1]
    rows = [
        torch.cat([tokens[:in_order], token_rows, context]),
        torch.cat([positions[:in_order], token_position, (check_position - shift).clamp_(min=0)]),
    ]
    packed = tokens.new_zeros(2, padded(len(into))).index_copy_(1, into, torch.stack(rows))
    return packed[0], packed[1], DraftRows(drafts.start, packed_row, on["where"], on["begin"])


def draft_keys(state: State, structure: Structure, on: dict[str, Tensor]) -> Tensor:
    """Return the keys of the random numbers of the verification rows that this rank reports."""
    assert structure.drafts is not None
    checks = on["chain"][len(on["chain"]) - structure.drafts.kinds[2] :]
    position = state.chain[0].view(-1).index_select(0, checks)[on["reported"]]
    sequence = structure.head_sequence[len(structure.head_sequence) - len(position) :]
    return state.noise_keys(to_device(sequence, position.device), position)
