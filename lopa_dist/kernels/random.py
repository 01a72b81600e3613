"""Counter-based random numbers: a hash of a key and a counter, without generator state, so in any order."""

from __future__ import annotations

import torch
from torch import Tensor


def mix(x: Tensor) -> Tensor:
    """Scramble int64 values so that neighbouring inputs give unrelated outputs (the SplitMix64 finaliser)."""
    x = (x ^ _shift(x, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    x = (x ^ _shift(x, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    return x ^ _shift(x, 31)


def gumbel(keys: Tensor, counters: Tensor) -> Tensor:
    """Return standard Gumbel noise for every key and counter: ``keys [H], counters [V]`` -> ``[H, V]`` fp32."""
    bits = mix(mix(keys)[:, None] + counters * -7046029254386353131)  # 0x9E3779B97F4A7C15
    uniform = (_shift(bits, 41).float() + 0.5) * 2.0**-23  # the top 23 bits: exact in fp32, never 0 or 1
    return -torch.log(-torch.log(uniform))


def _shift(x: Tensor, by: int) -> Tensor:
    """Return `x` shifted right logically, not arithmetically."""
    return (x >> by) & ((1 << (64 - by)) - 1)
