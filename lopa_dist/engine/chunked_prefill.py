"""Long prompts are prefilled in chunks, one between two steps, so that decoding never waits for a complete one.

Chunked prefill (Sarathi, arXiv 2308.16369; XY-Serve, section 2) is exact where a prompt is block-causal: a chunk is a
number of complete blocks, which see those before them in the cache. Chunks begin at the same tokens whatever else is
running, so they change no text from batch to batch. A chunk is a forward of its own: it keeps a device busy, and
windows beside it would gain nothing.
"""

from __future__ import annotations

import numpy as np
import torch

from lopa_dist.engine.kv_pool import KVPool, PrefixEntry
from lopa_dist.engine.prefix_rules import PrefixRules
from lopa_dist.engine.runner import Runner
from lopa_dist.ragged import padded, to_device
from lopa_dist.rows.forward_batch import ForwardBatch, Predictions
from lopa_dist.rows.prefill import Prefill


class ChunkedPrefill:
    """Computes the shared prefixes that are longer than a chunk, into the pool.

    Args:
        pool: has space for the prefixes.
        runner: runs the chunks.
        rules: how long chunks are.
    """

    def __init__(self, pool: KVPool, runner: Runner, rules: PrefixRules) -> None:
        self.pool, self.runner, self.rules = pool, runner, rules
        self.computed: set[int] = set()  # slots whose prefix was computed here and is not counted yet
        self.error: Exception | None = None  # of a chunk; the next forward tells the other ranks

    def waiting(self) -> list[int]:
        """Return the slots whose sequences cannot run before their prefix is computed, the first admitted first."""
        if self.rules.chunk is None:
            return []
        return [s for s, entry in self.pool.entry_of.items() if not entry.stored and self.rules.chunks(entry.tokens)]

    def compute(self, slot: int) -> None:
        """Compute the next chunk of the prefix of the sequence in `slot`; an exception is stored as `error`."""
        entry = self.pool.entry_of[slot]
        batch = self.batch(entry)
        count = int(batch.rows[0])
        try:
            self.runner.forward(self.runner.prepare(batch, np.array([slot])))
            if batch.place is None:
                self.pool.move(np.arange(count), entry.begin + entry.computed + np.arange(count))
        except Exception as error:
            self.error = self.error or error
        entry.computed += count
        if entry.stored:
            self.computed.add(slot)

    def batch(self, entry: PrefixEntry) -> ForwardBatch:
        """Return a forward of the next chunk alone, without predictions.

        Positions in it are counted from the prompt's first token.
        """
        size, first, causal = self.rules.unit, entry.computed, self.rules.config.causal
        tokens = entry.prefix[first : first + (self.rules.chunk or 0)]
        count, device = len(tokens), self.pool.keys.device
        rows = np.arange(count)
        ids, positions = np.zeros((2, padded(count)), np.int64)
        ids[:count], positions[:count] = tokens, first + rows
        one, none = np.array([count]), np.zeros(0, np.int64)
        start = one - count
        last = first + count == entry.tokens
        prefill = Prefill(
            sequence=start, first=start + first, behind=one + first,
            num_prefixes=1, waiting=one > 0, prefix_row=start - 1, suffix_row=start - 1,
            hidden_to_keep=(one - 1, start + entry.hidden_slot) if last and not causal else None,
        )  # fmt: skip
        nothing = torch.zeros(0, dtype=torch.long, device=device)
        return ForwardBatch(
            sequence=start, branch=start - 1, start=start, rows=one, shared=start + first + count * causal,
            first=prefill.first, hi=0 * rows if causal else np.minimum((rows // size + 1) * size, count),
            depth=0 * rows, tail=None, begin=start, stop=start,
            prefill=prefill, tokens=to_device(ids, device), positions=to_device(positions, device),
            predict=lambda: Predictions(nothing, None), head_slots=nothing, head_sequence=none, local_branches=1,
            columns=0, width=size, of_commit=None, drafts=None,
            seen=first + rows + 1 if causal else None, place=first + rows if causal else None,
        )  # fmt: skip
