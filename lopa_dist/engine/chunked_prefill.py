"""Long prompts are prefilled in chunks, one between two steps, so that decoding never waits for a whole prompt.

Chunked prefill (Sarathi, arXiv 2308.16369; XY-Serve, section 2) is exact if a prompt is block-causal: a chunk consists
of complete blocks, which see the blocks before them in the cache. Chunks begin at the same tokens whatever else is
running, so no text depends on the batch. A chunk is a forward of its own: it keeps a device busy by itself, so sharing
the forward with windows would gain nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np
import torch

from lopa_dist.engine.kv_pool import KVPool, PrefixEntry
from lopa_dist.engine.prefix_rules import PrefixRules
from lopa_dist.engine.runner import Runner
from lopa_dist.ragged import Ints, padded
from lopa_dist.rows.forward_batch import ForwardBatch, Heads, Predictions, RowTable, Windows
from lopa_dist.rows.prefill import Prefill
from lopa_dist.rows.row_maker import RowMaker
from lopa_dist.rows.share import ALONE
from lopa_dist.staging import to_device


@dataclass
class ChunkedPrefill:
    """Computes shared prefixes that are longer than a chunk, and stores their K/V in the pool."""

    pool: KVPool  # has space for the prefixes
    runner: Runner  # runs the chunks
    prefix_rules: PrefixRules  # how long chunks are
    row_maker: RowMaker  # of the rule
    attempt: Callable[[], AbstractContextManager[None]]  # context in which a chunk runs: `Lockstep.attempt`
    must_leave: Callable[[], bool]  # `Lockstep.must_leave`
    computed: set[int] = field(default_factory=set)  # slots whose prefix was computed here and is not counted yet

    def waiting(self) -> list[int]:
        """Return the slots whose sequences cannot run before their prefix is computed, in the order of admission."""
        chunk, pool = self.prefix_rules.chunk, self.pool
        if chunk is None or pool.prefix_length.max(initial=0) <= chunk:  # the usual case, found at once
            return []
        return [
            slot for slot, entry in pool.entry_of.items() if not entry.stored and self.prefix_rules.chunks(entry.tokens)
        ]

    def compute(self, slot: int) -> None:
        """Compute the next chunk of the prefix of the sequence in `slot`.

        If it fails on one of several branch ranks, that rank reports the error in the next `Lockstep.finish`, where
        all ranks of the replica end together.
        """
        entry = self.pool.entry_of[slot]
        batch = self.batch(entry)
        count = int(batch.table.rows[0])
        with self.attempt():
            self.runner.forward(self.runner.prepare(batch, np.array([slot])))
            if batch.table.place is None:
                self.pool.move(np.arange(count), entry.begin + entry.computed + np.arange(count))
        entry.computed += count
        if entry.stored:
            self.computed.add(slot)

    def batch(self, entry: PrefixEntry) -> ForwardBatch:
        """Return a forward of the prefix's next chunk alone, without predictions.

        Positions in it are counted from the prompt's first token.
        """
        size, first = self.prefix_rules.unit, entry.computed
        in_place = self.row_maker.in_place
        tokens = entry.prefix[first : first + (self.prefix_rules.chunk or 0)]
        count, device = len(tokens), self.pool.keys.device
        rows = np.arange(count)
        ids, positions = np.zeros((2, padded(count)), np.int64)
        ids[:count], positions[:count] = tokens, first + rows

        def one(value: int) -> Ints:  # for the one segment, or for its sequence
            return np.array([value])

        stores_hidden = first + count == entry.tokens and not in_place  # of the last row, to predict the next token
        prefill = Prefill(
            sequence=one(0), first=one(first), stop=one(first + count), num_prefixes=1, waiting=np.ones(1, bool),
            prefix_row=one(-1), suffix_row=one(-1),
            hidden_to_store=(one(count - 1), one(entry.hidden_slot)) if stores_hidden else None,
        )  # fmt: skip
        nothing = torch.zeros(0, dtype=torch.long, device=device)
        return ForwardBatch(
            table=RowTable(
                sequence=one(0), branch=one(-1), start=one(0), rows=one(count),
                shared=one(first + count if in_place else first), first=one(first),
                hi=np.zeros_like(rows) if in_place else np.minimum((rows // size + 1) * size, count),
                depth=np.zeros_like(rows), seen=first + rows + 1 if in_place else None,
                place=first + rows if in_place else None,
            ),
            tokens=to_device(ids, device), positions=to_device(positions, device),
            heads=Heads(lambda: Predictions(nothing, None), nothing, np.zeros(0, np.int64), branches=1, columns=0),
            share=ALONE, computed=one(0), prefill=prefill,
            windows=None if in_place else Windows(begin=one(0), stop=one(0), width=size, of_commit=None),
        )  # fmt: skip
