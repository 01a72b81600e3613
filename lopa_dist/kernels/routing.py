"""Which experts a row goes through, how much each weighs, and where the rows of each expert are.

Rows are grouped by expert, in whole tiles: matrix kernels then give a row the same bits in any group. On a GPU two
kernels do all of this after the router's product (`routing_triton`), and the host waits for nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lopa_dist.kernels.dispatch import fused
from lopa_dist.ragged import ROW_TILE


class Router(NamedTuple):
    """How rows choose among the experts."""

    chosen: int  # experts that a row goes through
    renormalise: bool  # whether their weights are scaled to sum to 1
    sigmoid: bool = False  # scores are sigmoids of each logit; else a softmax over all
    scale: float = 1.0  # factor of the weights, with sigmoids
    groups: int = 1  # groups of equally many experts, with sigmoids
    chosen_groups: int = 1  # groups that a row chooses first; its experts are from these


class Groups(NamedTuple):
    """Where the rows of each expert are: one group after the other, each in whole tiles."""

    place: Tensor  # [R, k] the grouped row of each choice
    choice: Tensor  # [P] number of the choice of each grouped row; 0 for padding
    row: Tensor  # [P] the row that made it; 0 for padding
    ends: Tensor  # [E] int32, where each expert's group ends, padding included
    height: int = ROW_TILE  # rows per tile

    def experts(self) -> Tensor:
        """Return the expert of each choice, ``[R, k]``."""
        return torch.searchsorted(self.ends, self.place.int(), right=True)


def choose(logits: Tensor, bias: Tensor | None, router: Router) -> tuple[Tensor, Tensor]:
    """Return the experts that rows choose, ``[R, k]``, and their weights, ``[R, k]`` fp32.

    With softmax these are the most probable experts, each weighted by its probability (Qwen3-MoE). With sigmoids they
    are the experts with the greatest sum of score and bias, from the groups whose two best have the greatest total
    (DeepSeek-V3, LLaDA2). The bias only decides which experts are chosen; how much each weighs depends on its score.

    Args:
        logits: ``[R, E]``; with sigmoids in fp32.
        bias: ``[E]`` with sigmoids, else None.
        router: how rows choose.
    """
    if not router.sigmoid:
        probability = logits.softmax(-1, dtype=torch.float32)
        weights, chosen = probability.topk(router.chosen, -1)
        return chosen, weights / weights.sum(-1, keepdim=True) if router.renormalise else weights
    assert bias is not None
    score = logits.sigmoid()
    rank = (score + bias.float()).unflatten(-1, (router.groups, -1))  # [R, groups, experts of a group]
    best = rank.topk(2, -1).values.sum(-1).topk(router.chosen_groups, -1).indices
    open_groups = torch.zeros_like(rank[..., 0], dtype=torch.bool).scatter(-1, best, True)
    chosen = rank.masked_fill(~open_groups[..., None], -torch.inf).flatten(-2).topk(router.chosen, -1).indices
    weights = score.gather(-1, chosen)
    if router.renormalise and router.chosen > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen, weights * router.scale


def room_for(choices: int, experts: int, height: int) -> int:
    """Return how many grouped rows `choices` choices give at most, in whole tiles of `height` rows."""
    return -(-(choices + min(experts, choices) * (height - 1)) // height) * height


def grouped(chosen: Tensor, experts: int, height: int = ROW_TILE) -> Groups:
    """Return rows grouped by the experts that they chose, ``chosen [R, k]``, in tiles of `height` rows.

    On a GPU the host does not wait for the groups' sizes, so there is room for as many grouped rows as there could be.
    """
    flat = chosen.flatten()
    counts = torch.zeros(experts, dtype=torch.int64, device=flat.device)
    counts.index_add_(0, flat, torch.ones_like(flat))
    sizes = (counts + height - 1) // height * height
    ends = sizes.cumsum(0)
    order = flat.argsort(stable=True)
    number = torch.empty_like(order)
    number[order] = torch.arange(len(order), device=flat.device)
    place = (ends - sizes)[flat] + number - (counts.cumsum(0) - counts)[flat]
    room = room_for(len(flat), experts, height) if flat.is_cuda else int(ends[-1])
    choice = torch.zeros(room, dtype=torch.int64, device=flat.device)
    choice[place] = torch.arange(len(flat), device=flat.device)
    return Groups(place.view_as(chosen), choice, choice // chosen.shape[1], ends.int(), height)


def routed(
    logits: Tensor, bias: Tensor | None, router: Router, height: int = ROW_TILE, rows: Tensor | None = None
) -> tuple[Tensor, Groups]:
    """Return the weights of rows' experts, ``[R, k]`` fp32, and where the rows of each expert are.

    Args:
        logits, bias, router: as in `choose`.
        height: rows per tile.
        rows: ``[1]`` int32 on the device, how many rows are real; None: all. On a GPU the others are in no group, so no
            expert's weights are read for them alone: their places are 0, and their outputs undefined.
    """
    if fused(logits, "experts"):
        from lopa_dist.kernels import routing_triton

        if routing_triton.takes(router, logits.shape[1]):
            return routing_triton.routed(logits, bias, router, height, rows)
    chosen, weights = choose(logits, bias, router)
    return weights, grouped(chosen, logits.shape[1], height)
