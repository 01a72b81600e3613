"""K/V of all sequences: one flat pool of token slots.

Every sequence slot owns a region for what is committed; behind the regions lies scratch space, where each forward's
rows write their K/V in packed order (pre-write). Committing copies the winner's finished rows from scratch into its
sequence's region, here or, when another rank ran the winner, from one packed buffer (LoPA-Dist's two-phase protocol).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lopa_dist.models.config import ModelConfig

Ints = NDArray[np.int64]


class KVPool:
    """Keys and values ``[layers, slots, kv_heads, head_dim]``; `region` slots a sequence, scratch behind them."""

    def __init__(
        self, model: ModelConfig, sequences: int, region: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.region, self.scratch = region, sequences * region
        shape = (model.layers, self.scratch, model.kv_heads, model.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def base(self, sequence: Ints) -> Ints:
        """First slot of sequences' regions."""
        return sequence * self.region

    def reserve(self, rows: int) -> None:
        """Make room for `rows` rows of scratch, and some more: what lies there is of the last step, and not kept."""
        if self.scratch + rows > self.keys.shape[1]:
            layers, _, heads, dim = self.keys.shape
            keys, values = self.keys, self.values
            self.keys = keys.new_zeros(layers, self.scratch + rows * 3 // 2, heads, dim)
            self.values = torch.zeros_like(self.keys)
            self.keys[:, : self.scratch] = keys[:, : self.scratch]
            self.values[:, : self.scratch] = values[:, : self.scratch]

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Pre-write: this forward's rows ``[R, kv_heads, head_dim]`` into scratch."""
        self.keys[layer, self.scratch : self.scratch + len(k)] = k
        self.values[layer, self.scratch : self.scratch + len(v)] = v

    def pack(self, rows: Ints) -> Tensor:
        """K/V of scratch rows as one buffer ``[2, layers, rows, kv_heads, head_dim]``."""
        at = torch.from_numpy(self.scratch + rows).to(self.keys.device)
        return torch.stack([self.keys[:, at], self.values[:, at]])

    def store(self, slots: Ints, packed: Tensor) -> None:
        """Write a packed buffer into pool slots."""
        at = torch.from_numpy(slots).to(self.keys.device)
        self.keys[:, at], self.values[:, at] = packed[0], packed[1]

    def buffer(self, rows: int) -> Tensor:
        """An empty packed buffer."""
        layers, _, heads, dim = self.keys.shape
        return self.keys.new_empty(2, layers, rows, heads, dim)
