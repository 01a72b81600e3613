"""Rows that verify several drafts in one branch.

A branch verifies the drafts d_1 .. d_m, at positions p_1 .. p_m. Its own record says what it predicts at p_1. For the
others the branch would have to be filled with the drafts before them. Instead it gets two more rows a draft:

- the *token row* T_i (i < m): the token of d_i at position p_i;
- the *verification row* C_i (i > 1): the row that predicts position p_i, in the context of d_1 .. d_{i-1}. With the
  logit shift it is a copy of the row at p_i - 1, with the token that this position has then; without the shift it is a
  mask at p_i.

They stand behind the window's rows, in this order:

    window rows, in the order of positions | T_1 ... T_{m-1} | C_2 ... C_m

The window's rows do not see the drafts. T_i sees the window without the masks at p_1 .. p_i, and T_1 .. T_i. C_i sees
what T_{i-1} sees; no row sees C_i. So drafts see one another as if they were filled, but the rest of the window as it
was without them. That is an approximation, like a cache that is one step old (docs/architecture.md).

Two numbers for each row express this. Its `depth` is how many drafts it takes as filled: i for T_i and C_{i+1}, 0 for
the window's rows. Its `until` is the depth from which on rows do not see it: i for the mask at p_i. With block-causal
windows all drafts of a sequence lie in its first open block, and rows of later blocks are seen at depth 0 only.

All branches of a sequence have rows for the same number of drafts, so all have equal shapes, on whichever rank they
run. If a branch has fewer drafts, positions that it has filled stand behind them in `State.chain`. Their rows'
predictions are not used, and real drafts see the tokens there like any others.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lopa_dist.decode.config import DecodeConfig
from lopa_dist.decode.state import HostState, State
from lopa_dist.ragged import UNBOUNDED, Ints, ragged_arange, to_device
from lopa_dist.rows.forward_batch import DraftRows
from lopa_dist.rows.structure import Structure


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
    """Set what rows of drafts see and predict, as described above.

    Args:
        state, host: of this step.
        structure: of the windows' rows, with rows for drafts behind them; changed in place.
        origin: ``[S]`` what positions are counted from.
        extra: ``[S]`` from `drafts_with_rows`.
        ranks: of the branch group.
    """
    config, m = state.config, state.config.drafts
    sequence, branch = structure.sequence, np.maximum(structure.branch, 0)
    t = extra[sequence] * (structure.branch >= 0)  # [G] token rows, and as many verification rows
    of, number = np.arange(len(t)).repeat(t), ragged_arange(t)  # [D] segment of each, and its number in it
    depth = number + 1
    token_row = (structure.start + structure.rows - 2 * t)[of] + number
    check_row = token_row + t[of]
    until = np.full(len(structure.depth), UNBOUNDED)
    # a prediction that no draft can change needs no row (`DraftRows.begin`)
    begin = structure.begin
    if config.window_attention == "block_causal":
        begin = np.maximum(begin, host.complete - origin)
        block_end = (host.complete - origin)[sequence] + config.block_size
        until[structure.row_position[: len(until)] >= block_end.repeat(structure.rows)] = 1
    elif config.prompt_attention != "joint":
        begin = np.maximum(begin, -origin)
    for row in token_row, check_row:
        structure.depth[row] = depth
        structure.hi[row] = (structure.rows - 2 * t)[of] + depth
        until[row] = UNBOUNDED
    structure.draft_begin = begin

    # what is reported of the verification rows
    reported = structure.reported[of]
    column = structure.wanted + (extra.cumsum() - extra)[sequence[of]] + number
    slot = (branch[of] // ranks * structure.columns + column)[reported]
    structure.head_sequence = np.append(structure.head_sequence, sequence[of][reported])
    cell = (sequence * config.max_chain + branch * m)[of] + number
    structure.arrays |= {
        "slot": np.append(structure.arrays["slot"], slot),
        "chain": np.append(cell, cell + 1),  # in `State.chain`, of drafts with token rows, then with verification rows
        "draft_rows": np.append(token_row, check_row),
        "draft_sequence": sequence[np.append(of, of)],
        "draft_segment": of,
        "depth": depth,
        "until": until,
        "reported": np.flatnonzero(reported),
        "check_head": check_row[reported],
        "where": (np.arange(len(extra)) * (m - 1)).repeat(extra) + ragged_arange(extra),
    }


def place_drafts(state: State, on: dict[str, Tensor], tokens: Tensor, positions: Tensor) -> DraftRows:
    """Fill in the rows of drafts.

    Args:
        state: of this step.
        on: the arrays of `add_draft_rows` and `layout` on the device.
        tokens, positions: ``[R']`` of all rows; changed in place.
    """
    shift, count = int(state.vocabulary.shift), len(on["depth"])
    position, token = state.chain.flatten(1).index_select(1, on["chain"])  # [2 D]
    if shift:
        context = state.chain_context.view(-1).index_select(0, on["chain"][count:])
    else:
        context = torch.full_like(token[count:], state.vocabulary.mask_id)
    tokens.index_copy_(0, on["draft_rows"], torch.cat([token[:count], context]))
    place = position + state.prompt.index_select(0, on["draft_sequence"])
    place[count:] -= shift
    positions.index_copy_(0, on["draft_rows"], place.clamp_(min=0))
    masks = on["offset"].index_select(0, on["draft_segment"]) + position[:count]
    return DraftRows(on["until"].index_copy(0, masks, on["depth"]), on["where"], on["draft_begin"])


def draft_keys(state: State, structure: Structure, on: dict[str, Tensor]) -> Tensor:
    """Return the keys of the random numbers of the verification rows that this rank reports."""
    checks = on["chain"][len(on["depth"]) :]
    position = state.chain[0].view(-1).index_select(0, checks)[on["reported"]]
    sequence = structure.head_sequence[len(structure.head_sequence) - len(position) :]
    return state.noise_keys(to_device(sequence, position.device), position)
