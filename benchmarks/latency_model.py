"""Formulas for the seconds of a forward, and of the exchange between branch ranks.

    forward(rows)  = max(weights / memory bandwidth, rows x 2 x parameters / arithmetic rate)
    exchange       = all_gather(B) + broadcasts x broadcast(C)
    all_gather(B)  = (ranks - 1) x (alpha + beta x B)         around a ring: each rank passes on what it received
    broadcast(C)   = ceil(log2 ranks) x (alpha + beta x C)    down a tree

B: the bytes of one rank's records: 12 for each prediction of each branch, and 4 more. The commits of a step take at
most one broadcast from each rank, and C are the K/V bytes of the tokens in one broadcast. That holds for full windows;
with block-causal windows, nothing is broadcast.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """A link between two ranks: a message takes `alpha` seconds, and `beta` more for each byte."""

    alpha: float
    beta: float

    def all_gather(self, ranks: int, size: float) -> float:
        """Return the seconds of an all-gather of `size` bytes from each rank."""
        return (ranks - 1) * (self.alpha + self.beta * size)

    def broadcast(self, ranks: int, size: float) -> float:
        """Return the seconds of a broadcast of `size` bytes from one rank."""
        return math.ceil(math.log2(ranks)) * (self.alpha + self.beta * size)


ASSUMED = Link(alpha=15e-6, beta=1 / 300e9)  # roughly NVLink; not measured


@dataclass(frozen=True)
class Model:
    """A model on a device. The defaults are Dream-7B in bf16 on one H200, from data sheets, not measured."""

    weight_bytes: float = 14.14e9  # read by every forward: all weights except the embedding table
    parameters: float = 7.07e9
    kv_bytes: float = 57_344  # K/V bytes of one token
    bandwidth: float = 4.8e12  # bytes per second
    rate: float = 0.5 * 989e12  # arithmetic operations per second: half the peak

    def forward(self, rows: float) -> float:
        """Return the seconds of a forward: the time to read the weights or to compute the rows, whichever is longer."""
        return max(self.weight_bytes / self.bandwidth, rows * 2 * self.parameters / self.rate)


@dataclass(frozen=True)
class Load:
    """What the branch ranks of a replica exchange in a step."""

    branches: int  # branches of each sequence, the anchor included
    sequences: int
    masked: float  # predictions of each branch: at masked positions and in verification rows
    commits: float  # commits of a sequence per step
    block: int  # tokens of a commit


def exchange(kv_bytes: float, link: Link, load: Load, ranks: int) -> float:
    """Return the seconds of the exchange between `ranks` branch ranks in a step; `kv_bytes` are the K/V of a token."""
    if ranks == 1:
        return 0.0
    local = -(-load.branches // ranks)
    records = 12 * load.masked * load.sequences * local + 4
    commits = load.commits * load.sequences  # one broadcast carries all commits whose winners are on the same rank
    broadcasts = min(commits, ranks)
    size = commits * load.block * kv_bytes / max(broadcasts, 1e-9)
    return link.all_gather(ranks, records) + broadcasts * link.broadcast(ranks, size)
