"""K/V of all sequences: one flat pool of token slots.

Every sequence in flight owns a range for what is committed, as long as its prompt and its longest answer. Where the K/V
of a prompt's first tokens (its lead: all of it, or the examples that many prompts begin with) depend on nothing behind
them, sequences whose prompts begin alike use one range for it, and own ranges for the rest. One of them computes a
lead, in the first forward that needs it, and some leads are kept when nobody uses them, for those who come later.

Behind the ranges lies scratch space, where each forward's rows write their K/V in packed order (pre-write). Committing
copies the winner's finished rows from scratch into its sequence's range, here or, when another rank ran the winner,
from one packed buffer (LoPA-Dist's two-phase protocol).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lopa_dist.decode.layout import Lead
from lopa_dist.models.config import ModelConfig
from lopa_dist.ragged import Ints, send

Tokens = tuple[int, ...]


@dataclass
class Shared:
    """A lead's range in the pool."""

    begin: int
    tokens: int
    last: int  # where the hidden state of its last row is kept, counted from behind: -1, -2, ...
    users: int = 1
    stored: bool = False  # its K/V are there


class KVPool:
    """Keys and values ``[layers, tokens, kv_heads, head_dim]``: `budget` tokens for sequences, scratch behind them."""

    def __init__(
        self, model: ModelConfig, sequences: int, budget: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.scratch = budget
        self.ranges: dict[int, tuple[int, int]] = {}  # by sequence: begin and end of all but its lead
        self.shared: dict[Tokens, Shared] = {}  # by lead; those that nobody uses in the order in which they were left
        self.lead_of: dict[int, Tokens] = {}  # by sequence
        self.bases = np.zeros(sequences, np.int64)  # where token 0 lies, or would if its lead lay before the rest
        self.lenders = np.zeros(sequences, np.int64)  # where it does lie
        self.leads = np.zeros(sequences, np.int64)  # tokens of the lead
        self.lasts = np.zeros(sequences, np.int64)  # as `Shared.last`
        self.most_kept = sequences  # leads that nobody uses
        self.most_leads = 2 * sequences
        shape = (model.layers, 0, model.kv_heads, model.head_dim)  # made with the first step's scratch, in one piece
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def allocate(self, sequence: int, tokens: int, lead: Tokens = ()) -> bool:
        """Give a sequence a range, the first that is long enough; false where there is none now.

        Args:
            sequence: which.
            tokens: how many, its prompt's included.
            lead: the first of them, as far as sequences that begin alike may share their K/V.
        """
        found = self.shared.get(lead)
        begin = self.room(tokens - len(lead) if found else tokens, lead)
        if begin is None and found and not found.users:  # it lies in the way of what should come behind it
            del self.shared[lead]
            found, begin = None, self.gap(tokens)
        if begin is None:
            return False
        if found:
            found.users += 1
            begin -= len(lead)  # as if the lead lay there
        elif lead:
            taken = {shared.last for shared in self.shared.values()}
            last = next(-i for i in range(1, self.most_leads + 1) if -i not in taken)
            found = self.shared[lead] = Shared(begin, len(lead), last)
        self.lead_of[sequence] = lead
        self.ranges[sequence] = (begin + len(lead), begin + tokens)
        self.bases[sequence], self.leads[sequence] = begin, len(lead)
        self.lenders[sequence], self.lasts[sequence] = (found.begin, found.last) if found else (begin, -1)
        return True

    def room(self, tokens: int, lead: Tokens) -> int | None:
        """Where so many tokens are free, if need be after dropping leads that nobody uses, but for `lead`."""
        idle = [key for key, shared in self.shared.items() if not shared.users and key != lead]
        begin = self.gap(tokens)
        while begin is None and idle:
            del self.shared[idle.pop(0)]
            begin = self.gap(tokens)
        return begin

    def gap(self, tokens: int) -> int | None:
        """Where so many tokens are free."""
        begin = 0
        taken = [*self.ranges.values(), *((s.begin, s.begin + s.tokens) for s in self.shared.values())]
        for low, high in [*sorted(taken), (self.scratch, self.scratch)]:
            if low - begin >= tokens:
                return begin
            begin = max(begin, high)
        return None

    def free(self, sequence: int) -> None:
        """Take the range back. The lead is kept, if it is stored and there are not too many already."""
        del self.ranges[sequence]
        lead = self.lead_of.pop(sequence)
        if not lead:
            return
        shared = self.shared[lead]
        shared.users -= 1
        if shared.users:
            return
        del self.shared[lead]
        if shared.stored:
            self.shared[lead] = shared  # the last to go
            idle = [key for key, shared in self.shared.items() if not shared.users]
            for key in idle[: len(idle) - self.most_kept]:
                del self.shared[key]

    def lead(self, sequences: Ints, prefill: NDArray[np.bool_]) -> Lead:
        """What a forward with these sequences must know of their leads; `prefill`: those without a cached prompt.

        Of several that need one lead, the first computes it.
        """
        source = np.full(len(sequences), -1)
        first: dict[Tokens, int] = {}
        for at in np.nonzero(prefill & (self.leads[sequences] > 0))[0].tolist():
            lead = self.lead_of[int(sequences[at])]
            if not self.shared[lead].stored:
                source[at] = first.setdefault(lead, at)
        return Lead(self.leads[sequences], source, self.lasts[sequences])

    def stored(self, sequence: int) -> bool:
        """Whether the K/V of a sequence's lead are there."""
        lead = self.lead_of.get(sequence, ())
        return bool(lead) and self.shared[lead].stored

    def store_lead(self, sequence: int) -> None:
        """From now on, the K/V of a sequence's lead are there."""
        self.shared[self.lead_of[sequence]].stored = True

    def slots(self, sequence: Ints, token: Ints) -> Ints:
        """Where tokens of sequences lie, by their absolute positions."""
        return np.where(token < self.leads[sequence], self.lenders[sequence], self.bases[sequence]) + token

    def views(
        self, sequence: Ints, tokens: Ints, rows: tuple[Ints, Ints] | None = None
    ) -> tuple[Ints, Ints, tuple[Ints, Ints] | None]:
        """Where the first `tokens` tokens of sequences lie: base, length; and, if some need two, a second such range.

        Args:
            sequence, tokens: ``[G]``.
            rows: ``[G]`` each, scratch rows where this forward writes a prompt's lead and what is behind it; -1: it
                does not, they are in the pool. Null: it writes no prompts.
        """
        leads, base, lender = self.leads[sequence], self.bases[sequence], self.lenders[sequence]
        if rows is not None:
            lead_row, rest_row = rows
            lender = np.where(lead_row >= 0, self.scratch + lead_row, lender)
            base = np.where(rest_row >= 0, self.scratch + rest_row - leads, base)
        apart = (leads > 0) & (lender != base)
        first = np.where(apart, np.minimum(leads, tokens), tokens)
        second = tokens - first
        return np.where(apart, lender, base), first, (base + first, second) if second.any() else None

    def reserve(self, rows: int, most: int | None = None) -> None:
        """Make room for `rows` rows of scratch: what lies there is of the last step, and not kept.

        Where there is not enough, `most` rows are made, by default half as many again. Keys and values are then made
        anew, the one after the other: for a moment the pool takes half as much memory again.
        """
        if self.scratch + rows > self.keys.shape[1]:
            most = rows * 3 // 2 if most is None else most
            self.keys = self.grown(self.keys, most)
            self.values = self.grown(self.values, most)

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
        """Copy K/V of scratch rows into pool slots: one of both after the other, for prompts' take gigabytes."""
        device = self.keys.device
        come, go = send(self.scratch + rows, device), send(slots, device)
        for pool in (self.keys, self.values):
            pool.index_copy_(1, go, pool.index_select(1, come))  # half the time of indexing on a CPU

    def pack(self, rows: Ints) -> Tensor:
        """K/V of scratch rows as one buffer ``[2, layers, rows, kv_heads, head_dim]``."""
        at = send(self.scratch + rows, self.keys.device)
        return torch.stack([self.keys.index_select(1, at), self.values.index_select(1, at)])

    def store(self, slots: Ints, packed: Tensor) -> None:
        """Write a packed buffer into pool slots."""
        at = send(slots, self.keys.device)
        self.keys.index_copy_(1, at, packed[0])
        self.values.index_copy_(1, at, packed[1])

    def buffer(self, rows: int) -> Tensor:
        """An empty packed buffer."""
        layers, _, heads, dim = self.keys.shape
        return self.keys.new_empty(2, layers, rows, heads, dim)
