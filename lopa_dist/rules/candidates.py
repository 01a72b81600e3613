"""Candidates of lookahead: the masked positions that the model is surest of, and the tokens that it predicts there."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lopa_dist.decode.state import State, Window
from lopa_dist.decode.winner import Winner


class Candidates(NamedTuple):
    """The candidates of every sequence, the most confident first."""

    column: Tensor  # [S, n] in the winner's records
    placed: Tensor  # [2, S, n] positions, tokens
    total: Tensor  # [S] number of possible positions, which may exceed n; only the first `total` columns count


def candidates(state: State, winner: Winner, window: Window, most: int, end: Tensor | None = None) -> Candidates:
    """Return the candidates for the branches of the next forward.

    They take their tokens from the winner's records, so no forward is spent on drafting (LoPA, section 3).

    Args:
        state: after the step; its config's `tau_look` bounds their probability.
        winner: of the step.
        window: from `advance`.
        most: n.
        end: ``[S]`` the position after the last possible candidate; None: the window's end.
    """
    config, records, span = state.config, winner.records, window.span
    masked = state.fillable(window.masked)
    possible = masked & (records.probability >= config.tau_look) if config.tau_look else masked
    if end is not None:
        possible = possible & (span < end[:, None])
    ranked = torch.where(possible, records.confidence, -torch.inf)
    column = ranked.sort(dim=1, descending=True, stable=True).indices[:, :most]
    placed = torch.stack([span.gather(1, column), records.token.gather(1, column)])
    return Candidates(column, placed, possible.sum(1))
