"""LoPA's part of a step: which branch wins (`verify`), and the branches of the next forward (`spawn`).

A rule of verification is a function ``(state, records) -> Winner`` in the table `VERIFY`. Whatever it chooses, D2F's
part of the step (`advance`) writes the tokens that the winner brings, and fills from the winner's records.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lopa_dist.decode.state import Records, State, Window, arange
from lopa_dist.decode.tree import by_agreement, most_candidates, spawn_tree
from lopa_dist.decode.winner import Winner, anchor_alone

ALL_FILLED = 1.0  # confidence of a branch that leaves nothing masked


def verify(state: State, records: Records) -> Winner:
    """Choose a branch of every sequence by the rule `DecodeConfig.verify`.

    Args:
        state: from which the forward was laid out.
        records: ``[S, K, W]`` over `state.window(W)`.
    """
    return VERIFY[state.config.verify](state, records)


def by_confidence(state: State, records: Records) -> Winner:
    """LoPA, as its paper describes it: the branch with the highest confidence in what it leaves masked wins (Eq. 2).

    Ties go to the lookahead branch that was created with the highest confidence, and to the anchor last.
    """
    if state.config.branches == 0:
        return anchor_alone(state, records)
    width = records.packed.shape[-1]
    window = state.window(width)
    number = arange(state.config.max_branches, window.span.device)
    # [S, K, W] what a branch leaves masked: all but the one position that it fills
    open_ = window.masked[:, None] & (state.edit_position != window.span[:, None])
    scores = branch_confidence(records.confidence, open_)
    scores = scores.masked_fill(number >= state.branches[:, None], -torch.inf)
    # argmax takes the first of equals: the lookaheads in their order, then the anchor
    branch = (scores.roll(-1, 1).argmax(1) + 1) % len(number)
    slot = arange(state.slots, branch.device)
    position, token = state.edits[:, slot, branch].unbind()
    return Winner(branch, Records(records.packed[:, slot, branch]), position, token, scores)


VERIFY: dict[str, Callable[[State, Records], Winner]] = {
    "confidence": by_confidence,
    "agreement": by_agreement,
}
"""The rules of verification, by their names in `DecodeConfig.verify`."""


def spawn(state: State, winner: Winner, window: Window | None) -> None:
    """Make the branches of the next forward: the anchor, and lookaheads at its most confident masked positions.

    The lookaheads take the tokens of the winner's records, so no forward is spent on drafting (LoPA, section 3).

    Args:
        state: after `advance`.
        winner: of this step.
        window: from `advance`.
    """
    config, records = state.config, winner.records
    most = most_candidates(config) if config.drafts else config.branches
    if not most:
        state.branches.copy_(state.done == 0)
        return
    assert window is not None
    span, masked = window.span, state.fillable(window.masked)
    possible = masked & (records.probability >= config.tau_look) if config.tau_look else masked
    if config.drafts > 1 and config.window_attention == "block_causal":
        # drafts see one another, so all are in one block: the first that has masks (`draft_rows`)
        possible = possible & (span < (state.complete + config.block_size)[:, None])
    ranked = torch.where(possible, records.confidence, -torch.inf)
    column = ranked.sort(dim=1, descending=True, stable=True).indices[:, :most]  # [S, n] of the candidates
    candidates = torch.stack([span.gather(1, column), records.token.gather(1, column)])  # [2, S, n] positions, tokens
    count = possible.sum(1)  # of candidates; what lies behind them is not used
    if config.drafts:
        branches = spawn_tree(state, records, column, candidates, count)
    else:  # branch j fills the j-th candidate
        state.edits[:, :, 1 : column.shape[1] + 1, 0] = candidates
        branches = (count + 1).clamp(max=config.max_branches)
    state.branches.copy_(branches).masked_fill_(state.done != 0, 0)


def branch_confidence(confidence: Tensor, open_: Tensor) -> Tensor:
    """Score every branch by how sure the model is of what the branch leaves to be filled (LoPA, Eq. 2).

    Args:
        confidence: ``[S, K, W]`` of each branch's predictions.
        open_: ``[S, K, W]`` bool, the positions that a branch leaves masked.

    Returns:
        ``[S, K]`` fp64: the mean over a branch's open positions.
    """
    # sums in fp64 are exact, so the width of the batch's windows changes no rounding
    count = open_.sum(-1)  # [S, K]
    mean = confidence.double().mul_(open_).sum(-1) / count
    return mean.masked_fill(count == 0, ALL_FILLED)
