"""Branch verification: which branch of every sequence wins."""

from __future__ import annotations

import torch
from torch import Tensor

from lopa_dist.decode.confidence import branch_scores
from lopa_dist.decode.state import Records, State, places


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
    width = records.packed.shape[-1]
    window = state.window(width)
    k = places(state.config.max_branches, window.span.device)
    open_ = window.masked[:, None]  # what a branch's own edits leave masked
    for at in state.edit_position[..., None].unbind(2):
        open_ = open_ & (at != window.span[:, None])
    scores = branch_scores(state.config, records.confidence, open_, state.edit_confidence)
    scores = scores.masked_fill(k >= state.branches[:, None], -torch.inf)
    # argmax takes the first of equals: the lookaheads by rank, then the anchor
    winner = (scores.roll(-1, 1).argmax(1) + 1) % len(k)
    return winner, scores
