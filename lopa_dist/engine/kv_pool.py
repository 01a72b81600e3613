"""K/V of all sequences: one flat pool of token slots.

Every running sequence owns a range for its committed tokens, as long as its prompt and its longest answer. If the K/V
of a prompt's first tokens (its prefix: all of the prompt, or the examples that many prompts begin with) depend on
nothing after them, sequences whose prompts begin alike share one range for the prefix, and each owns a range for the
rest. One of them computes the prefix, in the first forward that needs it. Some unused prefixes stay for later requests.

After the ranges comes scratch space, where each forward's rows write their K/V in packed order (pre-write). Committing
copies the winner's complete blocks from scratch into its sequence's range. If another rank ran the winner, they come
from that rank as one packed buffer (LoPA-Dist's two-phase protocol).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lopa_dist.models.config import ModelConfig
from lopa_dist.ragged import Ints
from lopa_dist.rows.prefill import SharedPrefixes
from lopa_dist.staging import to_device

Tokens = tuple[int, ...]


@dataclass
class PrefixEntry:
    """A shared prefix's range in the pool."""

    begin: int
    prefix: Tokens
    hidden_slot: int  # where the hidden state of its last row is stored: -1, -2, ..., counted from the end
    ref_count: int = 1  # running sequences that use it
    computed: int = 0  # how many of its first tokens have their K/V computed

    @property
    def tokens(self) -> int:
        """The prefix's length in tokens."""
        return len(self.prefix)

    @property
    def stored(self) -> bool:
        """Whether the K/V of the whole prefix are computed."""
        return self.computed == self.tokens


class KVPool:
    """Keys and values ``[layers, tokens, kv_heads, head_dim]``: `budget` tokens for sequences, scratch after them."""

    def __init__(
        self, model: ModelConfig, sequences: int, budget: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.scratch = budget  # first slot of the scratch, after the sequences' slots
        self.ranges: dict[int, tuple[int, int]] = {}  # by sequence: begin and end of all but its prefix
        self.prefixes: dict[Tokens, PrefixEntry] = {}  # by tokens
        self.unused: dict[Tokens, PrefixEntry] = {}  # those of `prefixes`, in the order in which they became unused
        self.gaps: list[tuple[int, int]] = [(0, budget)] if budget else []  # begin and end of free slots, sorted
        self.entry_of: dict[int, PrefixEntry] = {}  # by sequence; none for an empty prefix
        self.base = np.zeros(sequences, np.int64)  # slot of token t >= prefix length is base + t
        self.prefix_base = np.zeros(sequences, np.int64)  # slot of token 0, in the range of the prefix
        self.prefix_length = np.zeros(sequences, np.int64)  # tokens of the prefix
        self.prefix_hidden = np.zeros(sequences, np.int64)  # as `PrefixEntry.hidden_slot`
        self.most_idle = sequences  # the most unused prefixes that stay
        self.most_prefixes = 2 * sequences
        self.hidden_slots = [*range(-self.most_prefixes, 0)]  # free ones (`PrefixEntry.hidden_slot`)
        shape = (model.layers, 0, model.kv_heads, model.head_dim)  # allocated in one piece, with the first scratch
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def allocate(self, sequence: int, tokens: int, prefix: Tokens = ()) -> bool:
        """Give a sequence the first free range that is long enough; return False if there is none now.

        Args:
            sequence: number of the sequence.
            tokens: how many it needs space for, its prompt's included.
            prefix: the first of them, whose K/V may be shared by sequences that begin alike.
        """
        found = self.prefixes.get(prefix)
        begin = self.find_free(tokens - len(prefix) if found else tokens, prefix)
        if begin is None and found and not found.ref_count:  # the unused prefix entry blocks the new range: evict it
            low, high = self.drop(prefix)
            found, begin = None, low if high - low >= tokens else None  # no other gap has become larger
        if begin is None:
            return False
        if found:
            found.ref_count += 1
            self.unused.pop(prefix, None)
            begin -= len(prefix)  # as if the prefix lay there
        elif prefix:
            found = self.prefixes[prefix] = PrefixEntry(begin, prefix, self.hidden_slots.pop())
            self.take(begin, begin + len(prefix))
        if found:
            self.entry_of[sequence] = found
        self.ranges[sequence] = (begin + len(prefix), begin + tokens)
        self.take(*self.ranges[sequence])
        self.base[sequence], self.prefix_length[sequence] = begin, len(prefix)
        self.prefix_base[sequence], self.prefix_hidden[sequence] = (
            (found.begin, found.hidden_slot) if found else (begin, -1)
        )
        return True

    def find_free(self, tokens: int, prefix: Tokens) -> int | None:
        """Return where `tokens` free slots begin; None if there is no room for them.

        Unused prefixes other than `prefix` are dropped until there is.
        """
        begin = self.first_gap(tokens)
        while begin is None and (oldest := next((key for key in self.unused if key != prefix), None)) is not None:
            low, high = self.drop(oldest)
            begin = low if high - low >= tokens else None  # no other gap has become larger
        return begin

    def first_gap(self, tokens: int) -> int | None:
        """Return where the first `tokens` consecutive free slots begin; None if there are none."""
        return next((low for low, high in self.gaps if high - low >= tokens), None)

    def take(self, begin: int, end: int) -> None:
        """Mark free slots as taken."""
        if begin < end:
            at = bisect_left(self.gaps, (begin + 1, 0)) - 1  # the gap that they lie in
            low, high = self.gaps[at]
            self.gaps[at : at + 1] = [gap for gap in ((low, begin), (end, high)) if gap[0] < gap[1]]

    def give_back(self, begin: int, end: int) -> tuple[int, int]:
        """Mark slots as free, and return the gap that they are in now."""
        if begin == end:
            return begin, end
        at = bisect_left(self.gaps, (begin, end))
        before, after = self.gaps[max(at - 1, 0) : at], self.gaps[at : at + 1]
        joins_before, joins_after = bool(before) and before[0][1] == begin, bool(after) and after[0][0] == end
        joined = (before[0][0] if joins_before else begin, after[0][1] if joins_after else end)
        self.gaps[at - joins_before : at + joins_after] = [joined]
        return joined

    def drop(self, prefix: Tokens) -> tuple[int, int]:
        """Free a prefix that is not used, and return the gap that it leaves."""
        entry = self.prefixes.pop(prefix)
        self.unused.pop(prefix, None)
        self.hidden_slots.append(entry.hidden_slot)
        return self.give_back(entry.begin, entry.begin + entry.tokens)

    def free(self, sequence: int) -> None:
        """Free a sequence's range. Its prefix stays if it was computed, up to `most_idle` unused ones."""
        self.give_back(*self.ranges.pop(sequence))
        entry = self.entry_of.pop(sequence, None)
        if entry is None:
            return
        entry.ref_count -= 1
        if entry.ref_count:
            return
        if not entry.stored:
            self.drop(entry.prefix)
            return
        self.unused[entry.prefix] = entry
        while len(self.unused) > self.most_idle:
            self.drop(next(iter(self.unused)))

    def clear(self) -> None:
        """Free all ranges, and drop all prefixes."""
        for held in (self.ranges, self.prefixes, self.unused, self.entry_of):
            held.clear()
        self.gaps[:] = [(0, self.scratch)] if self.scratch else []
        self.hidden_slots[:] = range(-self.most_prefixes, 0)
        for array in (self.base, self.prefix_base, self.prefix_length, self.prefix_hidden):
            array.fill(0)

    def shared_prefixes(self, sequences: Ints, prefill: NDArray[np.bool_]) -> SharedPrefixes:
        """Return what a forward with `sequences` needs to know about their prefixes.

        `prefill` marks those whose prompt is not cached. Of several that need the same prefix, the first computes it.
        """
        source = np.full(len(sequences), -1)
        length = self.prefix_length[sequences]
        first: dict[int, int] = {}  # by where the prefix lies
        at = np.flatnonzero(prefill & (length > 0))
        for number, sequence in zip(at.tolist(), sequences[at].tolist(), strict=True):
            entry = self.entry_of[sequence]
            if not entry.stored:
                source[number] = first.setdefault(entry.begin, number)
        return SharedPrefixes(length, source, self.prefix_hidden[sequences])

    def stored(self, sequence: int) -> bool:
        """Return whether the K/V of a sequence's prefix are computed."""
        return sequence in self.entry_of and self.entry_of[sequence].stored

    def store_prefix(self, sequence: int) -> None:
        """Note that the K/V of a sequence's prefix are computed."""
        entry = self.entry_of[sequence]
        entry.computed = entry.tokens

    def slots(self, sequence: Ints, token: Ints) -> Ints:
        """Return the pool slots of tokens, given by their sequences and their places."""
        return np.where(token < self.prefix_length[sequence], self.prefix_base[sequence], self.base[sequence]) + token

    def key_ranges(
        self, sequence: Ints, tokens: Ints, rows: tuple[Ints, Ints] | None
    ) -> tuple[Ints, Ints, tuple[Ints, Ints] | None]:
        """Return where the first `tokens` tokens of sequences lie: in one range, or in two if a prefix lies apart.

        Args:
            sequence, tokens: ``[G]``.
            rows: ``[G]`` each, the packed rows where this forward computes a prompt's prefix and the rest of it; -1:
                they are in the pool already. None: the forward computes no prompts.

        Returns:
            First slot and number of tokens of the first range, ``[G]`` each; then a pair of both for the second range,
            or None if no sequence has one.
        """
        length, base, prefix_base = self.prefix_length[sequence], self.base[sequence], self.prefix_base[sequence]
        if rows is not None:
            prefix_row, suffix_row = rows
            prefix_base = np.where(prefix_row >= 0, self.scratch + prefix_row, prefix_base)
            base = np.where(suffix_row >= 0, self.scratch + suffix_row - length, base)
        apart = (length > 0) & (prefix_base != base)
        first = np.where(apart, np.minimum(length, tokens), tokens)
        second = tokens - first
        return np.where(apart, prefix_base, base), first, (base + first, second) if second.any() else None

    def reserve(self, rows: int, most: int | None = None) -> None:
        """Make sure that there are `rows` rows of scratch; what scratch holds may be lost.

        If there are fewer, the pool grows to `most` rows of scratch, by default half as many again as needed. Keys and
        values are copied one after the other, so for a moment the pool takes half as much memory again.
        """
        if self.scratch + rows > self.keys.shape[1]:
            most = rows * 3 // 2 if most is None else most
            self.keys = self.grow(self.keys, most)
            self.values = self.grow(self.values, most)

    def grow(self, held: Tensor, rows: int) -> Tensor:
        """Return a copy of keys or values with scratch for `rows` rows."""
        layers, tokens, heads, dim = held.shape
        larger = held.new_zeros(layers, self.scratch + rows, heads, dim)
        if tokens:
            larger[:, : self.scratch] = held[:, : self.scratch]
        return larger

    def move(self, rows: Ints | Tensor, slots: Ints) -> None:
        """Copy K/V of scratch rows into pool slots; keys first, then values, because prompts' K/V take gigabytes."""
        device = self.keys.device
        come, go = self.scratch_slots(rows), to_device(slots, device)
        for pool in (self.keys, self.values):
            pool.index_copy_(1, go, pool.index_select(1, come))  # half the time of indexing on a CPU

    def scratch_slots(self, rows: Ints | Tensor) -> Tensor:
        """Return the slots of packed rows, on the device."""
        return self.scratch + (rows if isinstance(rows, Tensor) else to_device(rows, self.keys.device))

    def pack(self, rows: Ints | Tensor) -> Tensor:
        """Return K/V of scratch rows as one buffer ``[2, layers, rows, kv_heads, head_dim]``."""
        at = self.scratch_slots(rows)
        return torch.stack([self.keys.index_select(1, at), self.values.index_select(1, at)])

    def store(self, slots: Ints, packed: Tensor) -> None:
        """Write a packed buffer into pool slots."""
        at = to_device(slots, self.keys.device)
        self.keys.index_copy_(1, at, packed[0])
        self.values.index_copy_(1, at, packed[1])

    def buffer(self, rows: int) -> Tensor:
        """Return an empty packed buffer for `rows` rows."""
        layers, _, heads, dim = self.keys.shape
        return self.keys.new_empty(2, layers, rows, heads, dim)
