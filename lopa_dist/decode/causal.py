"""The step of a causal model: drafts are verified, and what is accepted is what decoding one token at a time gives.

The last verified token is *pending*: its K/V are not computed yet. It stands at position ``complete - 1``, and the
drafts d_1 .. d_m behind it. In a causal model the row of each token predicts the next one from exactly the tokens
before it, so the rows of pending and of the drafts verify everything at once:

- d_i is accepted if all before it are and the row before it predicts d_i;
- the row of the last accepted token predicts one more token, which is verified, too, and is pending next.

Masks behind the chain predict the drafts of the next step (I-DLM, arXiv 2604.11035). There may be a group of them
behind every token where the chain may end (TiDAR, arXiv 2511.08923). Where the chain ends without a group behind it,
the next step has no drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lopa_dist.decode.state import FAILED, Records, State, arange
from lopa_dist.decode.winner import Winner
from lopa_dist.decode.written import note


def verify(state: State, records: Records) -> Winner:
    """Accept drafts as long as the row before each predicts it.

    Args:
        state: as it was laid out for the forward.
        records: ``[S, D]``, what the rows of pending and of the drafts predict. `Records.drafts` ``[S, D, n]`` is what
            the masks behind each of these rows predict; token -1 where there is no mask.

    Returns:
        The verified tokens, up to the first end-of-text and the answer's limit.
    """
    depth = arange(records.packed.shape[2], state.canvas.device)
    position = state.complete[:, None] + depth  # [S, D] which each row predicts
    draft = state.answers.gather(1, position)
    agrees = (records.token == draft) & (depth < state.drafts[:, None])
    accepted = agrees.cumprod(1).sum(1)
    brought = (depth <= accepted[:, None]) & (position < state.limit[:, None]) & (state.done == 0)[:, None]
    if state.config.stop_at_eos:
        ends = (is_eos(state, records.token) & brought).long()
        brought &= ends.cumsum(1) - ends == 0
    branch, position = state.branches.new_zeros(state.slots), torch.where(brought, position, -1)
    return Winner(branch, records, position, records.token.long(), accepted=accepted, probability=records.packed[1])


def is_eos(state: State, token: Tensor) -> Tensor:
    """Return which tokens end a text."""
    return (token[..., None] == state.eos_ids).any(-1)


def advance(state: State, winner: Winner) -> None:
    """Write the verified tokens, and move the frontiers behind them, in place."""
    records, running = winner.records, state.done == 0
    brought = winner.position >= 0
    count = brought.sum(1)
    failed = ((records.probability + records.confidence).isnan() & brought).any(1)
    at = state.complete[:, None] + arange(brought.shape[1], brought.device)
    state.answers.scatter_(1, at, torch.where(brought, winner.token, state.answers.gather(1, at)))
    state.eos |= (is_eos(state, winner.token) & brought).any(1)
    state.complete += count
    state.committed.copy_(torch.where(running, state.complete - 1, state.committed))
    state.end.copy_(state.complete)
    state.done |= (state.complete >= state.limit) | (state.eos & state.config.stop_at_eos)
    state.done.masked_fill_(failed, FAILED)
    state.step += running
    assert winner.accepted is not None
    state.accepted.copy_(torch.minimum(winner.accepted, count))
    note(state, winner)


def spawn(state: State, winner: Winner) -> None:
    """Put the drafts of the next step behind the pending token: what the masks behind the chain's end predicted.

    Drafts stand in the canvas. None does that no row could verify before the answer's limit.
    """
    slots = arange(state.slots, state.canvas.device)
    groups = winner.records.drafts
    assert groups is not None
    state.branches.copy_(state.done == 0)
    assert winner.accepted is not None
    token = groups.token[slots, winner.accepted].long()  # [S, n]
    count = (token >= 0).cumprod(1).sum(1)
    room = (state.limit - 1 - state.complete).clamp(min=0)
    state.drafts.copy_(torch.minimum(count, room)).masked_fill_(state.done != 0, 0)
    at = state.complete[:, None] + arange(token.shape[1], token.device)
    drafted = arange(token.shape[1], token.device) < state.drafts[:, None]
    state.answers.scatter_(1, at, torch.where(drafted, token, state.answers.gather(1, at)))
