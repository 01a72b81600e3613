"""How long a forward and the exchange between branch ranks take, by a formula.

    forward(rows)  = max(weights / memory bandwidth, rows x 2 x parameters / arithmetic rate)
    exchange       = all_gather(B) + commits x broadcast(C)
    all_gather(B)  = (ranks - 1) x (alpha + beta x B)         ranks send on what they have, around a ring
    broadcast(C)   = ceil(log2 ranks) x (alpha + beta x C)    down a tree

B: bytes of one rank's records, 12 a masked position and branch, and 4; C: K/V bytes of the tokens that a step
commits (with full windows; block-causal ones send nothing).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """One message between two ranks: `alpha` seconds, and `beta` a byte."""

    alpha: float
    beta: float

    def all_gather(self, ranks: int, size: float) -> float:
        """Seconds; `size` bytes from every rank."""
        return (ranks - 1) * (self.alpha + self.beta * size)

    def broadcast(self, ranks: int, size: float) -> float:
        """Seconds; `size` bytes from one."""
        return math.ceil(math.log2(ranks)) * (self.alpha + self.beta * size)


ASSUMED = Link(alpha=15e-6, beta=1 / 300e9)  # a message over NVLink, about: not measured


@dataclass(frozen=True)
class Model:
    """What a model and a device take. Defaults: Dream-7B in bf16 on one H200, from data sheets, not measured."""

    weight_bytes: float = 14.14e9  # read by every forward: all but the embedding table
    parameters: float = 7.07e9
    kv_bytes: float = 57_344  # of one token
    bandwidth: float = 4.8e12  # bytes per second
    rate: float = 0.5 * 989e12  # arithmetic operations per second: half the peak

    def forward(self, rows: float) -> float:
        """Seconds: weights are read, or rows computed, whichever takes longer."""
        return max(self.weight_bytes / self.bandwidth, rows * 2 * self.parameters / self.rate)


@dataclass(frozen=True)
class Load:
    """What branch ranks exchange in a step."""

    branches: int  # of every sequence, the anchor among them
    sequences: int
    masked: float  # positions of a branch that are still masked
    commits: float  # of a sequence in a step
    block: int  # tokens that a commit adds


def exchange(kv_bytes: float, link: Link, load: Load, ranks: int) -> float:
    """Seconds that `ranks` branch ranks send in a step, where a token's K/V have `kv_bytes`."""
    if ranks == 1:
        return 0.0
    local = -(-load.branches // ranks)
    records = 12 * load.masked * load.sequences * local + 4
    commits = load.commits * load.sequences  # one broadcast carries all of an owner's; at most one an owner
    broadcasts = min(commits, ranks)
    size = commits * load.block * kv_bytes / max(broadcasts, 1e-9)
    return link.all_gather(ranks, records) + broadcasts * link.broadcast(ranks, size)
