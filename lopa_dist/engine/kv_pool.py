"""K/V of all sequences: one flat pool of token slots.

Every sequence in flight owns a range for what is committed, as long as its prompt and its longest answer; behind the
ranges lies scratch space, where each forward's rows write their K/V in packed order (pre-write). Committing copies the
winner's finished rows from scratch into its sequence's range, here or, when another rank ran the winner, from one
packed buffer (LoPA-Dist's two-phase protocol).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lopa_dist.decode.sending import send
from lopa_dist.models.config import ModelConfig

Ints = NDArray[np.int64]


class KVPool:
    """Keys and values ``[layers, tokens, kv_heads, head_dim]``: `budget` tokens for sequences, scratch behind them."""

    def __init__(
        self, model: ModelConfig, sequences: int, budget: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.scratch = budget
        self.bases = np.zeros(sequences, np.int64)  # first token of each sequence's range
        self.ranges: dict[int, tuple[int, int]] = {}  # by sequence: begin, end
        shape = (model.layers, 0, model.kv_heads, model.head_dim)  # made with the first step's scratch, in one piece
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def allocate(self, sequence: int, tokens: int) -> bool:
        """Give a sequence a range, the first that is long enough; false where there is none now."""
        begin = 0
        for low, high in [*sorted(self.ranges.values()), (self.scratch, self.scratch)]:
            if low - begin >= tokens:
                self.ranges[sequence] = (begin, begin + tokens)
                self.bases[sequence] = begin
                return True
            begin = max(begin, high)
        return False

    def free(self, sequence: int) -> None:
        """Take the range back."""
        del self.ranges[sequence]

    def base(self, sequence: Ints) -> Ints:
        """First token of sequences' ranges."""
        return self.bases[sequence]

    def reserve(self, rows: int) -> None:
        """Make room for `rows` rows of scratch, and some more: what lies there is of the last step, and not kept."""
        if self.scratch + rows > self.keys.shape[1]:
            self.keys = self.grown(self.keys, rows * 3 // 2)
            self.values = self.grown(self.values, rows * 3 // 2)

    def grown(self, held: Tensor, rows: int) -> Tensor:
        """Keys or values with scratch for so many rows."""
        layers, tokens, heads, dim = held.shape
        larger = held.new_zeros(layers, self.scratch + rows, heads, dim)
        if tokens:
            larger[:, : self.scratch] = held[:, : self.scratch]
        return larger

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Pre-write: this forward's rows ``[R, kv_heads, head_dim]`` into scratch."""
        self.keys[layer, self.scratch : self.scratch + len(k)] = k
        self.values[layer, self.scratch : self.scratch + len(v)] = v

    def move(self, rows: Ints, slots: Ints) -> None:
        """Copy K/V of scratch rows into pool slots: one of both after the other, for a prompt's take gigabytes."""
        device = self.keys.device
        come, go = send(self.scratch + rows, device), send(slots, device)
        for pool in (self.keys, self.values):
            pool[:, go] = pool[:, come]

    def pack(self, rows: Ints) -> Tensor:
        """K/V of scratch rows as one buffer ``[2, layers, rows, kv_heads, head_dim]``."""
        at = send(self.scratch + rows, self.keys.device)
        return torch.stack([self.keys[:, at], self.values[:, at]])

    def store(self, slots: Ints, packed: Tensor) -> None:
        """Write a packed buffer into pool slots."""
        at = send(slots, self.keys.device)
        self.keys[:, at], self.values[:, at] = packed[0], packed[1]

    def buffer(self, rows: int) -> Tensor:
        """An empty packed buffer."""
        layers, _, heads, dim = self.keys.shape
        return self.keys.new_empty(2, layers, rows, heads, dim)
