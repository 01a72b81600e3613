"""What verification hands to the rest of the step."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from lopa_dist.decode.state import Records, State


class Winner(NamedTuple):
    """What verification decides for every sequence. F is the most tokens that a winner may contribute."""

    branch: Tensor  # [S] int64, the branch that wins
    records: Records  # [S, W] that branch's predictions, over the windows
    position: Tensor  # [S, F] int64, the positions of the tokens that it contributes; -1: none
    token: Tensor  # [S, F] int64, the tokens there (those of records are int32)
    scores: Tensor | None = None  # [S, K] branch confidences, -inf for branches that did not run (`rules.lopa`)
    # [S] number of accepted drafts, whose tokens come first; None: the rule verifies no drafts. If it verifies drafts,
    # `fill` forces no position in a sequence to which the winner contributes tokens
    accepted: Tensor | None = None
    accepted_with: Tensor | None = None  # [S, K] drafts that the first 1 .. K branches alone would have brought
    probability: Tensor | None = None  # [S, F] bits of the tokens' fp32 probabilities; where there is `accepted`
    ended: Tensor | None = None  # [S] bool, whether an end-of-text is among the tokens (causal); None: none ends a text


def anchor_alone(state: State, records: Records) -> Winner:
    """Return the anchor, the only branch, as the winner: it has no edits, so it brings nothing.

    Args:
        state: from which the forward was laid out.
        records: ``[S, K, W]``.
    """
    position, token = state.edits[:, :, 0]
    return Winner(state.branches.new_zeros(state.slots), Records(records.packed[:, :, 0]), position, token)
