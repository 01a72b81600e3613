"""A fill rule of one's own: ``lopa-dist decode.fill=examples/rules.py:budget``."""

from __future__ import annotations

import torch
from torch import Tensor


def budget(probability: Tensor, confidence: Tensor, masked: Tensor) -> Tensor:
    """Return which masked positions to fill: the most whose chances of an error add up to less than 0.2.

    Where it fills none, the best position of each fully active block is filled. It runs in every step, on all sequences
    together, and on a GPU in a CUDA graph: no Python loop over positions, no `.item()`.

    Args:
        probability: ``[S, W]`` of each position's most probable token.
        confidence: ``[S, W]``, what positions are ranked by (`decode.confidence`).
        masked: ``[S, W]`` bool, the positions that may be filled.
    """
    error = torch.where(masked, 1 - probability, torch.inf)
    cheapest = error.sort(dim=1, stable=True)
    affordable = cheapest.values.cumsum(1) < 0.2
    return torch.zeros_like(masked).scatter(1, cheapest.indices, affordable)
