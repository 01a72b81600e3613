"""LoPA's part of a step: which branch wins (`verify`), and the branches of the next forward (`spawn`).

A rule of verification is a function ``(state, records) -> Winner`` in the table `VERIFY`. Whatever it chooses, D2F's
part of the step (`advance`) writes the tokens that the winner brings, and fills from the winner's records.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lopa_dist.decode.config import DecodeConfig
from lopa_dist.decode.state import Records, State, arange

ALL_FILLED = 1.0  # confidence of a branch that leaves nothing masked


class Winner(NamedTuple):
    """What verification decides for every sequence."""

    branch: Tensor  # [S] the branch that wins
    records: Records  # [S, W] that branch's predictions, over the windows
    position: Tensor  # [S, F] where it brings tokens; -1: nothing
    token: Tensor  # [S, F] the tokens there
    scores: Tensor | None = None  # [S, K] branch confidences, -inf for branches that did not run


def verify(state: State, records: Records) -> Winner:
    """Choose a branch of every sequence by the rule `DecodeConfig.verify`.

    Args:
        state: as it was laid out for the forward.
        records: ``[S, K, W]`` over `state.window(W)`.
    """
    return VERIFY["confidence"](state, records)


def by_confidence(state: State, records: Records) -> Winner:
    """LoPA as published: the branch with the highest confidence in what it leaves masked wins (Eq. 2).

    Ties go to the lookahead branch that was created with the highest confidence, and to the anchor last.
    """
    width = records.packed.shape[-1]
    window = state.window(width)
    slots, k = (arange(n, window.span.device) for n in (state.slots, state.config.max_branches))
    open_ = window.masked[:, None]  # [S, K, W] what a branch leaves masked
    for position in state.edit_position[..., None].unbind(2):
        open_ = open_ & (position != window.span[:, None])
    scores = branch_confidence(state.config, records.confidence, open_, state.edit_confidence)
    scores = scores.masked_fill(k >= state.branches[:, None], -torch.inf)
    # argmax takes the first of equals: the lookaheads by rank, then the anchor
    branch = (scores.roll(-1, 1).argmax(1) + 1) % len(k)
    position, token = state.edits[:, slots, branch].unbind()
    return Winner(branch, Records(records.packed[:, slots, branch]), position, token, scores)


VERIFY: dict[str, Callable[[State, Records], Winner]] = {"confidence": by_confidence}
"""The rules of verification, by their names in `DecodeConfig.verify`."""


def spawn(state: State, winner: Winner) -> None:
    """Make the branches of the next forward: the anchor, and lookaheads at its most confident masked positions.

    The lookaheads take the tokens of the winner's records, so no forward is spent on drafting (LoPA, section 3).

    Args:
        state: after `advance`, whose windows it still holds.
        winner: of this step.
    """
    config, records = state.config, winner.records
    k = config.branches
    if k == 0:
        state.branches.copy_(state.done == 0)
        state.set_window(None)
        return
    span, _, _, masked = state.window(records.packed.shape[-1])
    masked = state.fillable(masked)
    candidates = masked & (records.probability >= config.tau_look) if config.tau_look else masked
    ranked, rank = torch.where(candidates, records.confidence, -torch.inf).sort(dim=1, descending=True, stable=True)
    ranked, rank = ranked[:, :k], rank[:, :k]  # [S, k'] candidates first; branches of what is behind them do not run
    made = torch.stack([span.gather(1, rank), records.token.gather(1, rank)])  # [2, S, k']
    count = rank.shape[1]  # the window may be shorter than k
    if config.lookahead == "single":
        state.edits[:, :, 1 : count + 1, 0] = made
    else:
        nested = torch.ones(count, count, dtype=torch.bool, device=span.device).tril()  # branch j takes j edits
        state.edit_position.fill_(-1)
        state.edits[:, :, 1 : count + 1, :count] = made[:, :, None].masked_fill(~nested, -1)
        ranked = ranked.double().cumsum(1) / arange(count + 1, span.device)[1:]
    state.edit_confidence[:, 1 : count + 1] = ranked
    torch.clamp(candidates.sum(1) + 1, max=k + 1, out=state.branches)
    state.branches.masked_fill_(state.done != 0, 0)
    state.set_window(None)


def branch_confidence(config: DecodeConfig, confidence: Tensor, open_: Tensor, created: Tensor) -> Tensor:
    """Score every branch by how sure the model is of what the branch leaves to be filled (LoPA, Eq. 2).

    Args:
        config: `score`, `score_fraction`, `score_window` and `alpha` are read.
        confidence: ``[S, K, W]`` of each branch's predictions.
        open_: ``[S, K, W]`` bool, the positions that a branch leaves masked.
        created: ``[S, K]`` confidence that a branch was created with (1 for the anchor).

    Returns:
        ``[S, K]`` fp64: the mean (or its variant) over a branch's open positions, mixed with `created` by `alpha`.
    """
    # sums in fp64 are exact: how wide the batch's windows are changes no rounding
    count = open_.sum(-1)  # [S, K]
    if config.score == "mean":
        level = confidence.double().mul_(open_).sum(-1) / count
    elif config.score == "gain":
        exact = confidence.double()
        level = exact.sub_(confidence[:, :1]).mul_(open_).sum(-1) / count
    elif config.score == "lowest_fraction":
        lowest = confidence.double().masked_fill(~open_, torch.inf).sort(-1).values
        # round before the floor: in binary, 100 * 0.29 is below 29
        keep = torch.floor((count.double() * config.score_fraction * 1e9).round() / 1e9).long().clamp(min=1)
        ranks = torch.arange(open_.shape[-1], device=open_.device)
        level = torch.where(ranks < keep[..., None], lowest, 0.0).sum(-1) / keep
    else:
        level = _weakest_run(confidence.double().masked_fill(~open_, 0.0), open_, count, config.score_window)
    level = level.masked_fill(count == 0, ALL_FILLED)
    return config.alpha * created + (1 - config.alpha) * level if config.alpha else level


def _weakest_run(known: Tensor, open_: Tensor, count: Tensor, window: int) -> Tensor:
    """Return the least mean over `window` consecutive open positions, or over all of them where fewer are open."""
    order = torch.argsort(~open_, dim=-1, stable=True)  # open positions first, in position order
    run = count.clamp(1, window)[..., None]  # [S, K, 1]
    total = known.gather(-1, order).cumsum(-1)  # [S, K, W]
    ends = torch.arange(known.shape[-1], device=known.device).expand_as(total)
    before = torch.where(ends >= run, total.gather(-1, (ends - run).clamp(min=0)), 0.0)
    complete = (ends + 1 >= run) & (ends < count[..., None])
    return torch.where(complete, (total - before) / run, torch.inf).amin(-1)
