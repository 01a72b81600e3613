"""K/V of all sequences: one flat pool of token slots.

Every sequence in flight owns a range for what is committed, as long as its prompt and its longest answer. Where a
prompt's K/V do not depend on the answer, sequences with equal prompts (samples of one) use one range for it, and own
ranges for their answers: the one that came first lends, the others borrow. Behind the ranges lies scratch space, where
each forward's rows write their K/V in packed order (pre-write). Committing copies the winner's finished rows from
scratch into its sequence's range, here or, when another rank ran the winner, from one packed buffer (LoPA-Dist's
two-phase protocol).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lopa_dist.decode.sending import send
from lopa_dist.models.config import ModelConfig

Ints = NDArray[np.int64]
Tokens = tuple[int, ...]


@dataclass
class Prompt:
    """A prompt's range, and how many sequences use it."""

    begin: int
    tokens: int
    users: int = 1
    stored: bool = False  # its K/V are there


class KVPool:
    """Keys and values ``[layers, tokens, kv_heads, head_dim]``: `budget` tokens for sequences, scratch behind them."""

    def __init__(
        self, model: ModelConfig, sequences: int, budget: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.scratch = budget
        self.ranges: dict[int, tuple[int, int]] = {}  # by sequence: begin, end of all but its prompt, if that is named
        self.prompts: dict[Tokens, Prompt] = {}
        self.prompt_of: dict[int, Tokens] = {}  # by sequence
        self.bases = np.zeros(sequences, np.int64)  # where token 0 lies, or would if it were not borrowed
        self.lenders = np.zeros(sequences, np.int64)  # where borrowed tokens begin
        self.borrowed = np.zeros(sequences, np.int64)  # how many a sequence has, from token 0 on
        shape = (model.layers, 0, model.kv_heads, model.head_dim)  # made with the first step's scratch, in one piece
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def allocate(self, sequence: int, tokens: int, prompt: Tokens = ()) -> bool:
        """Give a sequence a range, the first that is long enough; false where there is none now.

        Args:
            sequence: which.
            tokens: how many, its prompt's included.
            prompt: the first of them, if sequences that begin alike may share their K/V.
        """
        found = self.prompts.get(prompt) if prompt else None
        borrowed = found.tokens if found else 0
        begin = self.gap(tokens - borrowed)
        if begin is None:
            return False
        if found:
            found.users += 1
            self.lenders[sequence] = found.begin
        elif prompt:
            self.prompts[prompt] = Prompt(begin, len(prompt))
        self.prompt_of[sequence] = prompt
        self.borrowed[sequence], self.bases[sequence] = borrowed, begin - borrowed
        self.ranges[sequence] = (begin + (0 if found else len(prompt)), begin + tokens - borrowed)
        return True

    def gap(self, tokens: int) -> int | None:
        """Where so many tokens are free."""
        begin = 0
        taken = [*self.ranges.values(), *((p.begin, p.begin + p.tokens) for p in self.prompts.values())]
        for low, high in [*sorted(taken), (self.scratch, self.scratch)]:
            if low - begin >= tokens:
                return begin
            begin = max(begin, high)
        return None

    def free(self, sequence: int) -> None:
        """Take the range back, and the prompt's with its last user."""
        del self.ranges[sequence]
        key = self.prompt_of.pop(sequence)
        if key:
            self.prompts[key].users -= 1
            if not self.prompts[key].users:
                del self.prompts[key]

    def claim_prompt(self, sequence: int) -> bool:
        """Whether a sequence is to store its prompt: unless another has. From now on, it counts as stored."""
        prompt = self.prompts.get(self.prompt_of[sequence])
        stored = prompt is not None and prompt.stored
        if prompt is not None:
            prompt.stored = True
        return not stored

    def slots(self, sequence: Ints, token: Ints) -> Ints:
        """Where tokens of sequences lie, by their absolute positions."""
        return np.where(token < self.borrowed[sequence], self.lenders[sequence], self.bases[sequence]) + token

    def views(self, sequence: Ints, tokens: Ints) -> tuple[Ints, Ints, tuple[Ints, Ints] | None]:
        """Where the first `tokens` tokens of sequences lie: base, length; if any are borrowed, a second such range."""
        borrowed, base = self.borrowed[sequence], self.bases[sequence]
        if not borrowed.any():
            return base, tokens, None
        first = np.where(borrowed > 0, np.minimum(borrowed, tokens), tokens)
        return np.where(borrowed > 0, self.lenders[sequence], base), first, (base + first, tokens - first)

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
