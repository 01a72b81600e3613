"""A fill rule of your own: ``lopa-dist decode.fill=examples/rules.py:budget``."""

from __future__ import annotations

import torch
from torch import Tensor


def budget(probability: Tensor, confidence: Tensor, masked: Tensor) -> Tensor:
    """Return which masked positions to fill: as many as possible whose chances of an error add up to less than 0.2.

    In a fully active block where the function fills none, the best position is filled. The function runs in every step,
    on all sequences together, and on a GPU in a CUDA graph. So use no Python loop over positions, and no `.item()`.

    Args:
        probability: ``[S, W]``, the probability of each position's predicted token.
        confidence: ``[S, W]``, what ranks positions (`decode.confidence`).
        masked: ``[S, W]`` bool, the positions that may be filled.
    """
    error = torch.where(masked, 1 - probability, torch.inf)
    cheapest = error.sort(dim=1, stable=True)
    affordable = cheapest.values.cumsum(1) < 0.2
    return torch.zeros_like(masked).scatter(1, cheapest.indices, affordable)
