"""LoPA as its paper describes it (arXiv 2512.16229): lookahead branches, of which the most confident one wins.

Every step runs the anchor and k branches, each of which has one more token filled: the first at the position that the
model is surest of, the second at the position that it is second surest of, and so on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lopa_dist.decode.state import Records, State, Window, arange, of_branch
from lopa_dist.decode.winner import Winner
from lopa_dist.rules.candidates import candidates
from lopa_dist.rules.rule import Rule

ALL_FILLED = 1.0  # confidence of a branch that leaves nothing masked


def verify(state: State, records: Records) -> Winner:
    """Return as the winner the branch with the highest confidence in what it leaves masked (LoPA, Eq. 2).

    Ties go to the lookahead branch that was created with the highest confidence, and to the anchor last.

    Args:
        state: from which the forward was laid out.
        records: ``[S, K, W]`` over `state.window(W)`.
    """
    width = records.packed.shape[-1]
    window = state.window(width)
    number = arange(state.config.max_branches, window.span.device)
    # [S, K, W] what a branch leaves masked: all but the one position that it fills
    open_ = window.masked[:, None] & (state.edit_position != window.span[:, None])
    scores = branch_confidence(records.confidence, open_)
    scores = scores.masked_fill(number >= state.branches[:, None], -torch.inf)
    # argmax takes the first of equals: the lookaheads in their order, then the anchor
    branch = (scores.roll(-1, 1).argmax(1) + 1) % len(number)
    position, token = of_branch(state.edits, branch, 1).unbind()
    return Winner(branch, Records(of_branch(records.packed, branch, 1)), position, token, scores)


def spawn(state: State, winner: Winner, window: Window | None) -> None:
    """Make the branches of the next forward: the anchor, and lookaheads; branch j fills the j-th candidate.

    Args:
        state: after `advance`.
        winner: of this step.
        window: from `advance`.
    """
    assert window is not None
    found = candidates(state, winner, window, state.config.branches)
    state.edits[:, :, 1 : found.column.shape[1] + 1, 0] = found.placed
    branches = (found.total + 1).clamp(max=state.config.max_branches)
    torch.mul(branches, state.done == 0, out=state.branches)


def branch_confidence(confidence: Tensor, open_: Tensor) -> Tensor:
    """Return the score of every branch: how sure the model is of what it leaves to be filled (LoPA, Eq. 2).

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


LOPA = Rule(
    "lopa",
    verify,
    spawn,
    serves=lambda config: not config.causal and config.verify == "confidence" and config.branches > 0,
)
