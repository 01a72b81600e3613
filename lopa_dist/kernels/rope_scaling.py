"""How models change rotations, or queries, for long contexts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # options and families are read without torch, which takes seconds to import
    from torch import Tensor


class Llama3Scaling(NamedTuple):
    """How Llama 3.1 and later slow down rotations for long contexts (arXiv 2407.21783; keys of `rope_scaling`).

    Frequencies with fewer than `low_freq_factor` turns over `original_positions` are divided by `factor`, those with
    more than `high_freq_factor` stay. In between, the two are interpolated linearly by the number of turns.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int

    def __call__(self, inverse: Tensor) -> Tensor:
        """Return the radians per position of each frequency, ``[D / 2]``."""
        turns = self.original_positions / (2 * math.pi / inverse)
        unchanged = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return (1 - unchanged) * inverse / self.factor + unchanged * inverse


class YarnScaling(NamedTuple):
    """How YaRN slows down rotations for long contexts (arXiv 2309.00071; keys of `rope_parameters`).

    Frequencies with more than `beta_fast` turns over `original_positions` stay, those with fewer than `beta_slow` are
    divided by `factor`. In between, the two are interpolated linearly by the frequency's index.
    """

    theta: float  # the base of the frequencies
    factor: float
    beta_fast: float
    beta_slow: float
    original_positions: int

    def __call__(self, inverse: Tensor) -> Tensor:
        """Return the radians per position of each frequency, ``[D / 2]``."""
        import torch

        count = len(inverse)
        low = max(math.floor(self.number(self.beta_fast, count)), 0)
        high = min(math.ceil(self.number(self.beta_slow, count)), 2 * count - 1)
        number = torch.arange(count, dtype=torch.float32, device=inverse.device)
        unchanged = 1 - ((number - low) / max(high - low, 1e-3)).clamp(0, 1)
        return 1 / (self.factor * self.theta ** (number / count)) * (1 - unchanged) + inverse * unchanged

    def number(self, turns: float, count: int) -> float:
        """Return the index, a fraction, of the frequency of `count` with this many turns over `original_positions`."""
        return count * math.log(self.original_positions / (turns * 2 * math.pi)) / math.log(self.theta)


class QueryScaling(NamedTuple):
    """How Ministral 3 scales up queries further on in a text, as Llama 4 does."""

    beta: float
    original_positions: int

    def __call__(self, positions: Tensor) -> Tensor:
        """Return the factors ``[R]`` fp32 of queries at positions ``[R]``; exactly 1 before `original_positions`."""
        return 1 + self.beta * (1 + (positions / self.original_positions).floor()).log()
