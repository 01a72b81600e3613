"""Rows that verify several drafts in one branch.

A branch verifies the drafts d_1 .. d_m, at positions p_1 .. p_m. Its own record says what it predicts at p_1. For the
others the branch would have to be filled with the drafts before them. Instead it gets two more rows a draft:

- the *token row* T_i (i < m): the token of d_i at position p_i;
- the *verification row* C_i (i > 1): the row that predicts position p_i, in the context of d_1 .. d_{i-1}. With the
  logit shift it is a copy of the row at p_i - 1, with the token that this position has then; without the shift it is a
  mask at p_i.

The window's rows do not see the drafts. T_i sees the window without the masks M_1 .. M_i at p_1 .. p_i, and T_1 .. T_i.
C_i sees what T_{i-1} sees; no row sees C_i. So drafts see one another as if they were filled, but the rest of the
window as it was without them: an approximation, as that of a cache that is a step old (docs/architecture.md).

A segment's columns are ordered so that every row sees one interval of them:

    T_{m-1} ... T_1 | window rows without masks of drafts | M_m ... M_1 | window rows of later blocks | C_2 ... C_m

With t = m - 1 token rows and B window rows up to the end of what drafts see, window rows see [t, t + their number), and
T_i and C_{i+1} see [t - i, t - i + B): a window of constant length that slides to the left. With full windows B is the
whole window. With block-causal ones all drafts of a sequence lie in its first open block, and B ends with that block.

Every branch of a sequence gets rows for as many drafts as its first branch has, so that all have equal shapes, whatever
rank runs them; where a branch has fewer drafts, the rest of its rows are not used.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lopa_dist.decode.config import DecodeConfig
from lopa_dist.decode.forward_batch import ROW_TILE, DraftRows, ForwardBatch
from lopa_dist.decode.state import HostState, State, arange
from lopa_dist.ragged import Ints, ragged_arange, to_device, together


def drafts_with_rows(config: DecodeConfig, host: HostState) -> Ints:
    """Return how many drafts of each sequence's branches have a verification row, ``[S]``: all but the first."""
    return np.maximum(np.minimum(host.drafts, config.drafts) - 1, 0) * (host.branches > 0)


def add_draft_rows(
    state: State, host: HostState, batch: ForwardBatch, extra: Ints, reported: NDArray[np.bool_], ranks: int
) -> ForwardBatch:
    """Return a batch with rows for drafts, in the order that is described above.

    Args:
        state, host: of this step.
        batch: laid out in the order of positions.
        extra: ``[S]`` from `drafts_with_rows`.
        reported: ``[G]`` bool, segments whose predictions this rank reports.
        ranks: of the branch group.
    """
    config, device = state.config, state.canvas.device
    m, shift = config.drafts, int(state.vocabulary.shift)
    sequence, start, rows = batch.sequence, batch.start, batch.rows
    branch = np.maximum(batch.branch, 0)
    t = extra[sequence] * (batch.branch >= 0)  # [G]
    drafts = np.minimum(np.maximum(host.drafts[sequence] - branch * m, 0), m) * (t > 0)  # [G] of the branch
    packed_start = (rows + 2 * t).cumsum() - (rows + 2 * t)
    seen = rows  # [G] window rows up to the end of what drafts see
    if config.window_attention == "block_causal":
        seen = np.minimum(host.complete[sequence] + config.block_size - batch.first, rows)
    total = int((rows + 2 * t).sum())
    padded = -(-total // ROW_TILE) * ROW_TILE

    # which segment and which draft (from 0) of its branch: a token row, a verification row, and the mask of each draft
    segments = np.arange(len(rows))
    of_token, token_draft = segments.repeat(t), ragged_arange(t)
    of_check, check_draft = of_token, token_draft + 1
    of_mask, mask_draft = segments.repeat(drafts), ragged_arange(drafts)
    in_chain = sequence * config.max_chain + branch * m  # of a branch's first draft
    token_row = (packed_start + t)[of_token] - 1 - token_draft
    check_row = (packed_start + t + rows)[of_check] + check_draft - 1
    mask_row = (packed_start + t + seen)[of_mask] - 1 - mask_draft

    # what each row sees of its segment
    offset = ragged_arange(rows)  # of window rows in the order of positions
    lo, hi = np.zeros((2, total), np.int64)
    window_row = offset + (packed_start + t).repeat(rows)
    lo[window_row], hi[window_row] = t.repeat(rows), t.repeat(rows) + batch.hi
    lo[token_row] = t[of_token] - 1 - token_draft
    lo[check_row] = t[of_check] - check_draft
    hi[token_row], hi[check_row] = lo[token_row] + seen[of_token], lo[check_row] + seen[of_check]

    # a window row that is no mask of a draft moves to the left by the masks of drafts before it. `moved` has the masks
    # of all segments before its own added, as the running count on the device has
    moved = window_row + (drafts.cumsum() - drafts).repeat(rows)
    moved += (offset >= seen.repeat(rows)) * drafts.repeat(rows)  # rows of later blocks stay where they are

    # what is reported of the verification rows; a prediction that no draft can change needs none (`DraftRows.begin`)
    kept = reported[of_check]
    begin = batch.begin
    if config.window_attention == "block_causal":
        begin = np.maximum(begin, host.complete)
    elif config.prompt_attention != "joint":
        begin = np.maximum(begin, 0)
    column = len(batch.where) + (extra.cumsum() - extra)[sequence[of_check]] + check_draft - 1
    slot = (branch[of_check] // ranks * batch.columns + column)[kept]
    where = (np.arange(len(extra)) * (m - 1)).repeat(extra) + ragged_arange(extra)

    into_window = start - batch.first  # plus a position: the row in the order of positions
    of_all, drafts_of_all = np.concatenate([of_mask, of_token, of_check]), [mask_draft, token_draft, check_draft]
    on = together(
        device, moved=moved, mask_row=mask_row, mask_window=into_window[of_mask], token_row=token_row,
        token_prompt=host.prompt[sequence[of_token]], check_row=check_row, check_prompt=host.prompt[sequence[of_check]],
        check_draft=check_draft, branch=(sequence * config.max_branches + branch)[of_check],
        check_window=into_window[of_check], first_row=start[of_check], last_row=(start + rows - 1)[of_check],
        draft=in_chain[of_all] + np.concatenate(drafts_of_all), head_row=check_row[kept], slot=slot, where=where,
        begin=begin,
    )  # fmt: skip
    position, draft = state.chain.flatten(1).index_select(1, on["draft"])
    of_masks, of_tokens, of_checks = position.split([len(of_mask), len(of_token), len(of_check)])

    # window rows
    masks = on["mask_window"] + of_masks
    count = torch.zeros_like(on["moved"]).index_fill_(0, masks, 1).cumsum_(0)
    packed_row = (on["moved"] - count).index_copy_(0, masks, on["mask_row"])

    # verification rows: the predicting position, and the token that it has in the context of the drafts before
    predicting = of_checks - shift
    if shift:
        earlier = state.chain.view(2, -1, m).index_select(1, on["branch"])  # [2, n, m] drafts of the same branch
        hit = (earlier[0] == predicting[:, None]) & (arange(m, device) < on["check_draft"][:, None])
        there = torch.minimum(torch.maximum(on["check_window"] + predicting, on["first_row"]), on["last_row"])
        tokens = torch.where(hit.any(1), (earlier[1] * hit).sum(1), batch.tokens.index_select(0, there))
    else:
        tokens = torch.full_like(predicting, state.vocabulary.mask_id)

    into = torch.cat([packed_row, on["token_row"], on["check_row"]])
    in_order = len(moved)
    rows_of = (batch.tokens[:in_order], draft[len(of_mask) :][: len(of_token)], tokens)
    at = (
        batch.positions[:in_order],
        of_tokens + on["token_prompt"],
        (predicting + on["check_prompt"]).clamp(min=0),
    )
    head_rows = packed_row.index_select(0, batch.head_rows.clamp(0, in_order - 1))
    if batch.prefill and batch.prefill.reads_kept:
        head_rows = torch.where(batch.head_rows < 0, batch.head_rows, head_rows)
    keys = batch.head_keys
    if keys is not None:
        reported_at = to_device(np.flatnonzero(kept), device)
        of = to_device(sequence[of_check][kept], device)
        keys = torch.cat([keys, state.noise_keys(of, of_checks[reported_at])])
    return replace(
        batch,
        start=packed_start,
        rows=rows + 2 * t,
        lo=lo,
        hi=hi,
        tokens=scattered(rows_of, into, padded),
        positions=scattered(at, into, padded),
        head_rows=torch.cat([head_rows, on["head_row"]]),
        head_slots=torch.cat([batch.head_slots, on["slot"]]),
        head_sequence=np.append(batch.head_sequence, sequence[of_check][kept]),
        head_keys=keys,
        drafts=DraftRows(start, packed_row, on["where"], on["begin"]),
    )


def scattered(parts: tuple[Tensor, ...], into: Tensor, size: int) -> Tensor:
    """Return `size` integers, those of `parts` at the indices `into`, 0 elsewhere."""
    values = torch.cat(parts)
    return torch.zeros(size, dtype=values.dtype, device=values.device).index_copy_(0, into, values)
