"""Branch verification: which branch of every sequence wins."""

from __future__ import annotations

import torch
from torch import Tensor

from lopa_dist.decode.confidence import branch_scores
from lopa_dist.decode.state import Records, State


def select(state: State, records: Records) -> tuple[Tensor, Tensor]:
    """Choose the branch with the highest confidence over what it leaves masked.

    Ties go to the lookahead branch that was created with the highest confidence, and to the anchor last
    (spec section 3).

    Args:
        state: before the step.
        records: ``[S, K, W]`` over `state.span(W)`.

    Returns:
        ``winner [S]`` and ``scores [S, K]``, -inf for branches that did not run.
    """
    width = records.token.shape[-1]
    open_ = state.masked(width)[:, None] & ~state.edited(width)
    scores = branch_scores(state.config, records.confidence, open_, state.edit_confidence)
    k = torch.arange(scores.shape[1], device=scores.device)
    scores = torch.where(k < state.branches[:, None], scores, -torch.inf)
    tie_order = torch.where(k == 0, len(k), k)  # lookaheads by rank, then the anchor
    best = scores == scores.amax(1, keepdim=True)
    winner = torch.where(best, tie_order, len(k) + 1).amin(1) % len(k)
    return winner, scores
