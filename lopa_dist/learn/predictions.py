"""What masks predict, compared with the answers: the loss, and how far chains are accepted."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lopa_dist.models.tensor_gradients import gathered, read_by_all
from lopa_dist.parallel.communicator import Communicator

ROWS = 1024  # rows whose logits are in memory at once
FLOOR = 0.05  # least weight of a mask


class Targets(NamedTuple):
    """What masks should predict."""

    real: Tensor  # [B, G, n] bool: which masks predict a token of the answer
    tokens: Tensor  # [M] the tokens that these predict
    rows: Tensor  # [M] in the flattened texts, the row whose own prediction is that token


def targets_of(tokens: Tensor, starts: Tensor, counts: Tensor, masks: int) -> Targets:
    """Return the targets of groups; the arguments are as in `groups.GroupBatch`, on the device."""
    number = torch.arange(1, masks + 1, device=tokens.device)
    real = number <= counts[..., None]
    first = torch.arange(len(tokens), device=tokens.device)[:, None, None] * tokens.shape[1]
    position = (first + starts[..., None] + 1 + number)[real]
    return Targets(real, tokens.flatten()[position], position - 1)


def logits_of(hidden: Tensor, head: Tensor, tensor: Communicator) -> Tensor:
    """Return the rows' logits ``[M, V]``; the arguments are as in `losses_of`."""
    own = F.linear(read_by_all(hidden, tensor), head.to(hidden.dtype))
    return own if tensor.size == 1 else gathered(own, tensor)


def losses_of(hidden: Tensor, head: Tensor, tokens: Tensor, tensor: Communicator) -> Tensor:
    """Return the cross-entropy of each row, ``[M]`` fp32.

    Args:
        hidden: ``[M, d]``.
        head: ``[V, d]``, this rank's part of the vocabulary.
        tokens: ``[M]``.
        tensor: the group that the model is split over.
    """

    def part(hidden: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(logits_of(hidden, head, tensor).float(), tokens, reduction="none")

    parts = zip(hidden.split(ROWS), tokens.split(ROWS), strict=True)
    if not torch.is_grad_enabled() or len(hidden) * len(head) < 2**24:
        return torch.cat([part(*one) for one in parts])
    return torch.cat([checkpoint(part, *one, use_reentrant=False) for one in parts])


def tokens_of(hidden: Tensor, head: Tensor, tensor: Communicator) -> Tensor:
    """Return what each row predicts, ``[M]``; the arguments are as in `losses_of`."""
    return torch.cat([logits_of(part, head, tensor).argmax(-1) for part in hidden.split(ROWS)])


def reach(losses: Tensor, real: Tensor) -> Tensor:
    """Return the weight of each mask ``[M]``: the chance that all masks before it in its group are right.

    It is scaled to lie between `FLOOR` and 1. A chain of drafts ends at the first wrong one, so what comes after it
    matters less.
    """
    right = torch.zeros(real.shape, device=losses.device)
    right[real] = (-losses.detach()).exp()
    before = F.pad(right[..., :-1], (1, 0), value=1.0).cumprod(-1)
    return before[real] * (1 - FLOOR) + FLOOR


class Reached(NamedTuple):
    """How far chains of drafts are accepted; arrays by depth, ``[n]``."""

    tried: NDArray[np.float64]  # chains with a draft at this depth, and all drafts before it accepted
    accepted: NDArray[np.float64]  # of these, chains whose draft at this depth is accepted
    chains: float

    @property
    def length(self) -> float:
        """Return how many drafts of a chain are accepted on average."""
        return float(self.accepted.sum() / max(self.chains, 1.0))

    @property
    def shares(self) -> list[float]:
        """Return the share of tried drafts that are accepted, by depth."""
        return [round(float(a / t), 4) if t else 0.0 for a, t in zip(self.accepted, self.tried, strict=True)]


def reached(right: Tensor, real: Tensor) -> Reached:
    """Return counts of chains; `right` ``[M]`` says which of the `real` masks ``[B, G, n]`` are right."""
    ok = torch.zeros(real.shape, device=right.device)
    ok[real] = right.float()
    chain = ok.cumprod(-1)
    tried = F.pad(chain[..., :-1], (1, 0), value=1.0) * real
    chains = float(real.any(-1).sum())
    return Reached(tried.sum((0, 1)).double().cpu().numpy(), chain.sum((0, 1)).double().cpu().numpy(), chains)
