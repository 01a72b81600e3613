"""Commit: the K/V of complete blocks move from the winner's scratch rows into its sequence's range, on every rank.

Causal models write K/V to their place at once; only K/V of branches beside the anchor move.

There are three cases (LoPA, on LoPA-Dist). With one rank nothing is sent. If the tokens' K/V are the same in every
branch (prompts, block-causal windows), each rank uses what it computed. Otherwise the winner's rank broadcasts one
packed buffer.
"""

from __future__ import annotations

import numpy as np

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
    if config.causal:
        commit_path(prepared, pool, before, after, comm)
        return
    pending = (before.complete > before.committed) & (before.branches > 0)
    if not config.stores_kv or not pending.any():
        return
    slot = prepared.slot(np.arange(len(winner)))
    if batch.prefill:
        commit_prompts(batch, batch.prefill, pool, slot)

    # all K/V that were computed before the window; with a dual cache also those behind it
    behind = batch.stop if config.stores_kv_behind else before.complete
    count = np.where(pending, np.maximum(behind - batch.begin, 0), 0)

    # the segments whose rows are stored: the winner's, or any if the rows are the same in every branch
    anywhere = (before.committed < 0) | (config.window_attention == "block_causal")
    segment = segments(batch, winner)
    chosen = np.where(anywhere, segment.max(1), segment[np.arange(len(winner)), winner])
    here = anywhere | (comm.size == 1)
    store(batch, pool, slot, chosen, before.prompt + batch.begin, count, np.where(here, -1, winner % comm.size), comm)


def commit_path(prepared: Prepared, pool: KVPool, before: HostState, after: HostState, comm: Communicator) -> None:
    """Store K/V of a causal model's branch that won; those of the anchor's tokens were written in place.

    Args: as of `commit`.
    """
    batch, winner = prepared.batch, after.winner
    if batch.prefill:
        for first in prepared.slot(batch.prefill.sequence[: batch.prefill.num_prefixes]).tolist():
            pool.store_prefix(first)
    # the last token that was written is the next pending one, whose K/V are not computed yet
    won = (winner > 0) & (before.branches > 1) & (after.done == 0)
    count = np.where(won, after.complete - before.complete - 1, 0)
    if count.any():
        chosen = segments(batch, winner)[np.arange(len(winner)), winner]
        owner = np.where(comm.size == 1, -1, (winner - 1) % comm.size)
        slot = prepared.slot(np.arange(len(winner)))
        store(batch, pool, slot, chosen, before.prompt + before.complete, count, owner, comm)


def segments(batch: ForwardBatch, winner: Ints) -> Ints:
    """Return the segment of each sequence's windows by branch, ``[S, K]``; -1: not on this rank."""
    branches = int(max(winner.max(), batch.branch.max(initial=0))) + 1
    segment = np.full((len(winner), branches), -1)
    of_window = np.nonzero(batch.branch >= 0)[0]
    segment[batch.sequence[of_window], batch.branch[of_window]] = of_window
    return segment


def store(
    batch: ForwardBatch,
    pool: KVPool,
    slot: Ints,
    segment: Ints,
    token: Ints,
    count: Ints,
    owner: Ints,
    comm: Communicator,
) -> None:
    """Store the K/V of the first rows of a segment of each sequence.

    Args:
        batch, pool, comm: as of `commit`.
        slot: ``[S]`` of the sequences.
        segment: ``[S]``.
        token: ``[S]`` the token of the sequence that the segment's first row holds.
        count: ``[S]`` rows.
        owner: ``[S]`` the branch rank that computed them; -1: every rank did.
    """
    sequence, number = np.arange(len(count)).repeat(count), ragged_arange(count)
    rows = np.append(batch.start, 0)[segment[sequence]] + number  # those of other ranks are not read
    slots = pool.slots(slot[sequence], token[sequence] + number)
    rank_of_row = owner[sequence]
    local = rank_of_row < 0
    if local.any():
        pool.move(rows[local], slots[local])
    for rank in range(comm.size):
        theirs = rank_of_row == rank
        if theirs.any():
            packed = pool.pack(rows[theirs]) if rank == comm.rank else pool.buffer(int(theirs.sum()))
            pool.store(slots[theirs], comm.broadcast(packed, rank))


def commit_prompts(batch: ForwardBatch, prefill: Prefill, pool: KVPool, slot: Ints) -> None:
    """Store the prompts, or parts of prompts, that were prefilled in segments of their own: the batch's first ones."""
    sequence, own = slot[prefill.sequence], slice(len(prefill.sequence))
    count, rows = batch.rows[own], np.arange(batch.rows[own].sum())
    token = np.repeat(batch.shared[own], count) + ragged_arange(count)
    pool.move(rows, pool.slots(np.repeat(sequence, count), token))
    for first in sequence[: prefill.num_prefixes].tolist():
        pool.store_prefix(first)
