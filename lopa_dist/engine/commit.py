"""Commit: the K/V of complete blocks move from the winner's scratch rows into its sequence's range, on every rank.

The rule's `RowMaker` says which rows are kept. Causal models write K/V directly to their place in the pool; for them,
only the K/V of branches other than the anchor move.

There are three cases (LoPA, on LoPA-Dist). With one rank nothing is sent. If the tokens' K/V are the same in every
branch (prompts, block-causal windows), each rank uses what it computed. Otherwise the winner's rank broadcasts one
packed buffer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lopa_dist.decode import DecodeConfig, HostState
from lopa_dist.engine.kv_pool import KVPool
from lopa_dist.engine.runner import Prepared
from lopa_dist.parallel.communicator import Communicator
from lopa_dist.ragged import Ints, ragged_arange
from lopa_dist.rows.forward_batch import ForwardBatch
from lopa_dist.rows.prefill import Prefill
from lopa_dist.rows.row_maker import RowMaker


def commit(
    prepared: Prepared,
    pool: KVPool,
    rows: RowMaker,
    config: DecodeConfig,
    before: HostState,
    after: HostState,
    comm: Communicator,
) -> None:
    """Store those K/V of the last forward that are kept: its prompts' and the winners'.

    Args:
        prepared: the last forward's batch.
        pool: its scratch still holds that forward's rows.
        rows: the rule's row maker.
        config: of the step.
        before, after: what the host knew when it laid out that forward, and what it knows now.
        comm: the branch group.
    """
    batch, winner = prepared.batch, after.winner
    slot = prepared.slot(np.arange(len(winner)))
    if batch.prefill:
        commit_prompts(batch, batch.prefill, pool, slot)
    kept = rows.kept(config, batch, before, after)
    if kept is None:
        return
    segment = segments(batch, winner)
    chosen = np.where(kept.anywhere, segment.max(1), segment[np.arange(len(winner)), winner])
    owner = np.where(kept.anywhere | (comm.size == 1), -1, batch.share.owner(winner))
    store(batch, pool, Moves(slot, chosen, kept.place, kept.rows, owner), comm)


def segments(batch: ForwardBatch, winner: Ints) -> Ints:
    """Return the segment of each sequence's window in each branch, ``[S, K]``; -1: not on this rank."""
    table = batch.table
    branches = int(max(winner.max(), table.branch.max(initial=0))) + 1
    segment = np.full((len(winner), branches), -1)
    of_window = np.nonzero(table.branch >= 0)[0]
    segment[table.sequence[of_window], table.branch[of_window]] = of_window
    return segment


class Moves(NamedTuple):
    """The first rows of one segment of each sequence, whose K/V are stored."""

    slot: Ints  # [S] of the sequence
    segment: Ints  # [S]
    place: Ints  # [S] of the token that the segment's first row holds
    rows: Ints  # [S] how many
    owner: Ints  # [S] the branch rank that computed them; -1: every rank did


def store(batch: ForwardBatch, pool: KVPool, moves: Moves, comm: Communicator) -> None:
    """Store the K/V of `moves`; the other arguments are those of `commit`."""
    sequence, number = np.arange(len(moves.rows)).repeat(moves.rows), ragged_arange(moves.rows)
    rows = np.append(batch.table.start, 0)[moves.segment[sequence]] + number  # those on other ranks are not read
    slots = pool.slots(moves.slot[sequence], moves.place[sequence] + number)
    rank_of_row = moves.owner[sequence]
    local = rank_of_row < 0
    if local.any():
        pool.move(rows[local], slots[local])
    for rank in range(comm.size):
        theirs = rank_of_row == rank
        if theirs.any():
            packed = pool.pack(rows[theirs]) if rank == comm.rank else pool.buffer(int(theirs.sum()))
            pool.store(slots[theirs], comm.broadcast(packed, rank))


def commit_prompts(batch: ForwardBatch, prefill: Prefill, pool: KVPool, slot: Ints) -> None:
    """Store the K/V of the prompts, or parts of prompts, that have segments of their own: the batch's first ones."""
    sequence, own, table = slot[prefill.sequence], slice(len(prefill.sequence)), batch.table
    if table.place is None:  # otherwise they were written in place
        count, rows = table.rows[own], np.arange(table.rows[own].sum())
        token = np.repeat(table.shared[own], count) + ragged_arange(count)
        pool.move(rows, pool.slots(np.repeat(sequence, count), token))
    for first in sequence[: prefill.num_prefixes].tolist():
        pool.store_prefix(first)
