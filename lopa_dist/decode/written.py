"""How each token of an answer was written: with which probability, in which step, and in what way.

It is recorded on the device while a running request asks for it (`Request.token_steps`), as a tensor ``[S, 3, N + 1]``
int32: probability (bits of fp32), step and way of each position; an extra column takes values without a position. At
masked positions the probability is that of the last prediction, because a lookahead branch may fill the position
without predicting it again.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from lopa_dist.decode.state import State, Window
from lopa_dist.decode.winner import Winner
from lopa_dist.staging import to_device

PROBABILITY, STEP, WAY = range(3)
FILLED, ACCEPTED, BONUS, EDITED = range(4)
WAYS = ("filled", "accepted", "bonus", "edited")


class Written(NamedTuple):
    """How a token was written."""

    probability: float  # by the model, after temperature and filters, in the context that proved or filled the token
    step: int  # forward of the request, from 1
    # "filled"; "accepted": a draft or a lookahead that stayed; "bonus": instead of a draft that failed; "edited":
    # instead of a token that was filled before
    way: str

    @property
    def logprob(self) -> float:
        """The log probability in nats, finite also where the probability is 0 in fp32."""
        return min(0.0, math.log(max(self.probability, sys.float_info.min)))


def record_written(state: State, wanted: bool) -> None:
    """Record how tokens are written from now on, if `wanted`; nothing is known about earlier tokens."""
    if not wanted:
        state.written = None
    elif state.written is None:
        slots, columns = state.answers.shape
        state.written = state.answers.new_zeros((slots, 3, columns + 1)).int()


def note(
    state: State,
    winner: Winner,
    window: Window | None = None,
    chosen: Tensor | None = None,
    replaced: Tensor | None = None,
) -> None:
    """Record how the tokens of a step were written, if a request asks. Call it after `State.step` has counted the step.

    Args:
        state: with the drafts of this step.
        winner: of the step; the tokens that it contributes have been written.
        window: the windows after the fill; None: the model has none.
        chosen: ``[S, W]`` bool, the positions that were filled from the winner's records.
        replaced: ``[S, W]`` bool, the positions whose token was replaced by the records'; None: none.
    """
    if state.written is None:
        return
    last = state.written.shape[2] - 1
    rows = state.written.unbind(1)

    def put(row: int, position: Tensor, value: Tensor) -> None:
        target = position.masked_fill(position < 0, last)
        rows[row].scatter_(1, target, value.int().expand_as(target))

    step = state.step[:, None]
    if winner.accepted is None:  # a lookahead token has the probability of the prediction that it comes from
        way = step.new_full((1, 1), ACCEPTED)
    else:
        assert winner.probability is not None
        put(PROBABILITY, winner.position, winner.probability)
        number, accepted = (winner.position >= 0).cumsum(1) - 1, winner.accepted[:, None]
        way = ((accepted < state.drafts[:, None]) * BONUS).masked_fill(number < accepted, ACCEPTED)
    put(STEP, winner.position, step)
    put(WAY, winner.position, way)
    if window is not None and chosen is not None:
        put(PROBABILITY, window.span.masked_fill(~(window.masked | chosen), -1), winner.records.packed[1])
        filled = window.span.masked_fill(~chosen, -1)
        put(STEP, filled, step)
        put(WAY, filled, step.new_full((1, 1), FILLED))
    if window is not None and replaced is not None:
        edited = window.span.masked_fill(~replaced, -1)
        put(PROBABILITY, edited, winner.records.packed[1])
        put(STEP, edited, step)
        put(WAY, edited, step.new_full((1, 1), EDITED))


def written(state: State, slots: Sequence[int], ends: Sequence[int]) -> list[list[Written]]:
    """Return how the answers in `slots` up to the positions `ends` were written, without `known` tokens."""
    assert state.written is not None
    recorded = state.written[to_device(np.array(slots), state.written.device)].cpu().numpy()
    known = state.known.cpu().numpy()[slots]
    answers = []
    for (probability, step, way), begin, end in zip(recorded, known, ends, strict=True):
        columns = (values[begin:end].tolist() for values in (probability.view(np.float32), step, way))
        answers.append([Written(p, s, WAYS[w]) for p, s, w in zip(*columns, strict=True)])
    return answers
