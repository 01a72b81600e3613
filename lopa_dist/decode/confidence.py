"""Branch confidence: how sure the model is of what a branch leaves to be filled (LoPA, Eq. 2)."""

from __future__ import annotations

import torch
from torch import Tensor

from lopa_dist.decode.config import DecodeConfig

ALL_FILLED = 1.0  # score of a branch that leaves nothing masked


def branch_scores(config: DecodeConfig, confidence: Tensor, open_: Tensor, created: Tensor) -> Tensor:
    """Score every branch.

    Args:
        config: `score`, `score_fraction`, `score_window` and `alpha` are read.
        confidence: ``[S, K, W]`` of each branch's predictions.
        open_: ``[S, K, W]`` bool, the positions a branch leaves masked.
        created: ``[S, K]`` confidence a branch was created with (1 for the anchor).

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
    """The least mean over `window` consecutive open positions; over all of them where fewer are open."""
    order = torch.argsort(~open_, dim=-1, stable=True)  # open positions first, in position order
    run = count.clamp(1, window)[..., None]  # [S, K, 1]
    total = known.gather(-1, order).cumsum(-1)  # [S, K, W]
    ends = torch.arange(known.shape[-1], device=known.device).expand_as(total)
    before = torch.where(ends >= run, total.gather(-1, (ends - run).clamp(min=0)), 0.0)
    complete = (ends + 1 >= run) & (ends < count[..., None])
    return torch.where(complete, (total - before) / run, torch.inf).amin(-1)
