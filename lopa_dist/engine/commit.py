"""Commit: the K/V of complete blocks move from the winner's scratch rows into its sequence's range, on every rank.

Three cases (LoPA, on LoPA-Dist): there is one rank, so nothing is sent; the tokens' K/V are the same
in every branch (prompts, block-causal windows), so each rank keeps what it computed; or the winner's
rank broadcasts one packed buffer.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from lopa_dist.decode import HostState, State
from lopa_dist.engine.kv_pool import KVPool
from lopa_dist.engine.runner import Prepared
from lopa_dist.parallel.communicator import Communicator
from lopa_dist.ragged import Ints, ragged_arange
from lopa_dist.rows.forward_batch import ForwardBatch
from lopa_dist.rows.prefill import Prefill


def commit(
    prepared: Prepared, pool: KVPool, state: State, before: HostState, after: HostState, comm: Communicator
) -> None:
    """Store the blocks that were complete before the last forward, and the prompts that it prefilled.

    Args:
        prepared: the last forward's batch.
        pool: its scratch still holds that forward's rows.
        state: of the batch's sequences, after the step.
        before, after: what the host knew of them for that forward, and knows now.
        comm: the branch group.
    """
    batch, config, winner = prepared.batch, state.config, after.winner
    if config.causal:  # K/V were written in place
        if batch.prefill:
            for slot in prepared.slot(batch.prefill.sequence[: batch.prefill.num_prefixes]).tolist():
                pool.store_prefix(slot)
        return
    pending = (before.complete > before.committed) & (before.branches > 0)
    if not config.stores_kv or not pending.any():
        return
    slot = prepared.slot(np.arange(len(winner)))
    if batch.prefill:
        commit_prompts(batch, batch.prefill, pool, slot)

    # all that was computed before the window; with a dual cache also what is behind it
    behind = batch.stop if config.stores_kv_behind else before.complete
    count = np.where(pending, np.maximum(behind - batch.begin, 0), 0)
    token = before.prompt + batch.begin

    # the segments whose rows are stored: the winner's, or any where the rows are the same in every branch
    segment = np.full((len(winner), int(max(winner.max(), batch.branch.max(initial=0))) + 1), -1)
    of_window = np.nonzero(batch.branch >= 0)[0]
    segment[batch.sequence[of_window], batch.branch[of_window]] = of_window
    anywhere = (before.committed < 0) | (config.window_attention == "block_causal")
    chosen = np.where(anywhere, segment.max(1), segment[np.arange(len(winner)), winner])
    here = anywhere | (comm.size == 1)

    def slots(sequences: Ints) -> Ints:
        of, first = (np.repeat(x[sequences], count[sequences]) for x in (slot, token))
        return pool.slots(of, first + ragged_arange(count[sequences]))

    def rows(sequences: Ints) -> Ints | Tensor:
        return batch.packed(np.repeat(chosen[sequences], count[sequences]), ragged_arange(count[sequences]))

    local = np.nonzero((count > 0) & here)[0]
    if len(local):
        pool.move(rows(local), slots(local))
    for owner in range(comm.size):
        theirs = np.nonzero((count > 0) & ~here & (winner % comm.size == owner))[0]
        if len(theirs):
            at = slots(theirs)
            packed = pool.pack(rows(theirs)) if owner == comm.rank else pool.buffer(len(at))
            pool.store(at, comm.broadcast(packed, owner))


def commit_prompts(batch: ForwardBatch, prefill: Prefill, pool: KVPool, slot: Ints) -> None:
    """Store the prompts, or parts of prompts, that were prefilled in segments of their own: the batch's first ones."""
    sequence, own = slot[prefill.sequence], slice(len(prefill.sequence))
    count, rows = batch.rows[own], np.arange(batch.rows[own].sum())
    token = np.repeat(batch.shared[own], count) + ragged_arange(count)
    pool.move(rows, pool.slots(np.repeat(sequence, count), token))
    for first in sequence[: prefill.num_prefixes].tolist():
        pool.store_prefix(first)
