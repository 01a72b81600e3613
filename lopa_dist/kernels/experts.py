"""Products of rows with the weights of the experts that each row chose, grouped by expert.

A row's bits depend on itself alone. Its expert gets it among others, in groups of any number of rows, so every group is
filled up to whole tiles of `ROW_TILE` rows, as all packed rows are: then matrix kernels give a row the same bits in any
group. And what a row's experts give is added up one after the other, in the order of the row's own choice.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lopa_dist.ragged import ROW_TILE


class Groups(NamedTuple):
    """Where the rows of each expert are: one group after the other, each of whole tiles."""

    place: Tensor  # [R, k] of each choice, among the grouped rows
    choice: Tensor  # [P] number of the choice that a grouped row is; of padding, 0
    ends: Tensor  # [E] int32, behind each expert's last row


def grouped(chosen: Tensor, experts: int) -> Groups:
    """Group rows by the experts that they chose, ``[R, k]``.

    On a GPU the host does not wait for their sizes, so there is room for as many grouped rows as there could be.
    """
    flat = chosen.flatten()
    counts = torch.zeros(experts, dtype=torch.int64, device=flat.device)
    counts.index_add_(0, flat, torch.ones_like(flat))
    sizes = (counts + ROW_TILE - 1) // ROW_TILE * ROW_TILE
    ends = sizes.cumsum(0)
    order = flat.argsort(stable=True)
    number = torch.empty_like(order)
    number[order] = torch.arange(len(order), device=flat.device)
    place = (ends - sizes)[flat] + number - (counts.cumsum(0) - counts)[flat]
    most = -(-(len(flat) + min(experts, len(flat)) * (ROW_TILE - 1)) // ROW_TILE) * ROW_TILE
    choice = torch.zeros(most if flat.is_cuda else int(ends[-1]), dtype=torch.int64, device=flat.device)
    choice[place] = torch.arange(len(flat), device=flat.device)
    return Groups(place.view_as(chosen), choice, ends.int())


def expert_linear(x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    """Each group's rows times its expert's weight: ``x [P, K], weight [E, N, K]`` -> ``[P, N]``.

    On a GPU this is torch's grouped product, and rows behind the last group are undefined.
    """
    if x.is_cuda:
        return F.grouped_mm(x, weight.transpose(1, 2), offs=groups.ends)
    out = x.new_empty(len(x), weight.shape[1])
    begin = 0
    for one, end in zip(weight, groups.ends.tolist(), strict=True):
        if end > begin:
            torch.mm(x[begin:end], one.T, out=out[begin:end])
        begin = end
    return out


def weighted_sum(x: Tensor, groups: Groups, weights: Tensor) -> Tensor:
    """What rows' experts gave ``[P, d]``, times ``weights [R, k]``, in fp32 and in the order of choice: ``[R, d]``."""
    total = torch.zeros(len(weights), x.shape[1], device=x.device)
    for place, weight in zip(groups.place.unbind(1), weights.float().unbind(1), strict=True):
        total += x.index_select(0, place).float() * weight[:, None]
    return total.to(x.dtype)
