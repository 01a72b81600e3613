"""Commit: the K/V of complete blocks move from the winner's scratch rows into its sequence's range, on every rank.

Three cases (LoPA, on LoPA-Dist): there is one rank, so nothing is sent; the tokens' K/V are the same
in every branch (prompts, block-causal windows), so each rank keeps what it computed; or the winner's
rank broadcasts one packed buffer.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from lopa_dist.decode.config import DecodeConfig
from lopa_dist.decode.forward_batch import ForwardBatch
from lopa_dist.decode.prefill import Prefill
from lopa_dist.decode.state import HostState
from lopa_dist.engine.kv_pool import KVPool
from lopa_dist.engine.runner import Prepared
from lopa_dist.parallel.communicator import Communicator
from lopa_dist.ragged import Ints, ragged_arange


def commit(
    prepared: Prepared, pool: KVPool, config: DecodeConfig, before: HostState, winner: Ints, comm: Communicator
) -> None:
    """Store the blocks that were complete before the last forward, and the prompts that it prefilled.

    Args:
        prepared: the last forward's batch.
        pool: its scratch still holds that forward's rows.
        config: `cache` and `window_attention` are read.
        before: as laid out for that forward.
        winner: ``[S]`` the branches that were chosen.
        comm: the branch group.
    """
    pending = (before.complete > before.committed) & (before.branches > 0)
    if not config.stores_kv or not pending.any():
        return
    batch = prepared.batch
    slot = prepared.slot(np.arange(len(winner)))
    if batch.prefill:
        commit_prompts(batch, batch.prefill, pool, slot)
    # all that was computed before the window; with a dual cache also what is behind it
    segment = np.full((len(winner), config.max_branches), -1)
    of_window = np.nonzero(batch.branch >= 0)[0]
    segment[batch.sequence[of_window], batch.branch[of_window]] = of_window
    behind = batch.stop if config.stores_kv_behind else before.complete
    count = behind - batch.begin
    pending &= count > 0
    anywhere = (before.committed < 0) | (config.window_attention == "block_causal")

    def slots(sequences: Ints) -> Ints:
        begin, of = before.prompt[sequences] + batch.begin[sequences], np.repeat(slot[sequences], count[sequences])
        return pool.slots(of, np.repeat(begin, count[sequences]) + ragged_arange(count[sequences]))

    def rows(sequences: Ints, segments: Ints) -> Ints | Tensor:
        return batch.packed(np.repeat(segments, count[sequences]), ragged_arange(count[sequences]))

    chosen = np.where(anywhere, segment.max(1), segment[np.arange(len(winner)), winner])
    here = anywhere | (comm.size == 1)
    local = np.nonzero(pending & here)[0]
    if len(local):
        pool.move(rows(local, chosen[local]), slots(local))
    for owner in range(comm.size):
        theirs = np.nonzero(pending & ~here & (winner % comm.size == owner))[0]
        if len(theirs):
            at = slots(theirs)
            packed = pool.pack(rows(theirs, chosen[theirs])) if owner == comm.rank else pool.buffer(len(at))
            pool.store(at, comm.broadcast(packed, owner))


def commit_prompts(batch: ForwardBatch, prefill: Prefill, pool: KVPool, slot: Ints) -> None:
    """Store the prompts, or parts of prompts, that were prefilled in segments of their own: the batch's first ones."""
    sequence, own = slot[prefill.sequence], slice(len(prefill.sequence))
    count, rows = batch.rows[own], np.arange(batch.rows[own].sum())
    token = np.repeat(batch.shared[own], count) + ragged_arange(count)
    pool.move(rows, pool.slots(np.repeat(sequence, count), token))
    for first in sequence[: prefill.num_prefixes].tolist():
        pool.store_prefix(first)
