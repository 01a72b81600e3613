"""Commit: the K/V of complete blocks move from the winner's scratch rows into its sequence's range, on every rank.

Three cases (LoPA, on LoPA-Dist): there is one rank, so nothing is sent; the tokens' K/V are the same
in every branch (prompts, block-causal windows), so each rank keeps what it computed; or the winner's
rank broadcasts one packed buffer. With cache=token, K/V of filled tokens take the same way in every step.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lopa_dist.decode import HostState, State
from lopa_dist.decode.forward_batch import ForwardBatch
from lopa_dist.decode.kept_tokens import KEPT, NEW, counted_before
from lopa_dist.decode.prefill import Prefill
from lopa_dist.decode.structure import row_span
from lopa_dist.engine.kv_pool import KVPool
from lopa_dist.engine.runner import Prepared
from lopa_dist.parallel.communicator import Communicator
from lopa_dist.ragged import Ints, ragged_arange, to_device


def commit(
    prepared: Prepared, pool: KVPool, state: State, before: HostState, after: HostState, comm: Communicator
) -> None:
    """Store the blocks that were complete before the last forward, the prompts that it prefilled, and kept tokens.

    Args:
        prepared: the last forward's batch.
        pool: its scratch still holds that forward's rows.
        state: of the batch's sequences, after the step.
        before, after: what the host knew of them for that forward, and knows now.
        comm: the branch group.
    """
    config = state.config
    if config.causal:  # K/V were written in place
        for slot in prefixes_of(prepared):
            pool.store_prefix(slot)
        return
    pending = (before.complete > before.committed) & (before.branches > 0)
    if config.stores_kv and pending.any():
        commit_blocks(prepared, pool, state, before, after.winner, comm, pending)
    if config.keeps_tokens:
        commit_tokens(prepared, pool, state, before, after, comm)


def prefixes_of(prepared: Prepared) -> list[int]:
    """Return the slots whose shared prefixes the forward computed."""
    prefill = prepared.batch.prefill
    return prepared.slot(prefill.sequence[: prefill.num_prefixes]).tolist() if prefill else []


def commit_blocks(
    prepared: Prepared,
    pool: KVPool,
    state: State,
    before: HostState,
    winner: Ints,
    comm: Communicator,
    pending: NDArray[np.bool_],
) -> None:
    """Store complete blocks, of the sequences `pending` ``[S]``, and prompts."""
    batch, config = prepared.batch, state.config
    slot = prepared.slot(np.arange(len(winner)))
    if batch.prefill:
        commit_prompts(batch, batch.prefill, pool, slot)
    # all that was computed before the window; with a dual cache also what is behind it
    behind = batch.stop if config.stores_kv_behind else before.complete
    count = np.where(pending, np.maximum(behind - batch.begin, 0), 0)
    anywhere = (before.committed < 0) | (config.window_attention == "block_causal")
    store_rows(prepared, pool, winner, comm, anywhere, count, ragged_arange(count), before.prompt + batch.begin)


def commit_tokens(
    prepared: Prepared, pool: KVPool, state: State, before: HostState, after: HostState, comm: Communicator
) -> None:
    """Store the tokens that are kept since this step, behind the committed ones and those that were kept before."""
    batch = prepared.batch
    count = np.where(after.kept > 0, after.kept - before.kept, 0)
    total = int(count.sum())
    if not total:
        return
    found = torch.nonzero_static(state.kv_kept == NEW, size=total)  # [n, 2] sequence and column
    offset = found[:, 1] - (state.origin + 1) - to_device(batch.begin, found.device)[found[:, 0]]
    offset -= counted_before(state.kv_kept == KEPT)[found[:, 0], found[:, 1]]
    token = after.prompt + row_span(state, after, None)[0] + before.kept
    store_rows(prepared, pool, after.winner, comm, np.zeros(len(count), bool), count, offset, token)


def store_rows(
    prepared: Prepared,
    pool: KVPool,
    winner: Ints,
    comm: Communicator,
    anywhere: NDArray[np.bool_],
    count: Ints,
    offset: Ints | Tensor,
    token: Ints,
) -> None:
    """Move K/V of windows' rows into the pool, on every rank.

    Args:
        prepared: the batch whose rows are in the pool's scratch.
        pool: changed.
        winner: ``[S]`` the branches that were chosen.
        comm: the branch group.
        anywhere: ``[S]`` whether the rows are the same in every branch, so that each rank has them.
        count: ``[S]`` rows of each sequence.
        offset: of all these rows, as of `ForwardBatch.packed`.
        token: ``[S]`` the place in a sequence's range where its first one goes.
    """
    batch, slot = prepared.batch, prepared.slot(np.arange(len(winner)))
    segment = np.full((len(winner), int(max(winner.max(), batch.branch.max(initial=0))) + 1), -1)
    of_window = np.nonzero(batch.branch >= 0)[0]
    segment[batch.sequence[of_window], batch.branch[of_window]] = of_window
    chosen = np.where(anywhere, segment.max(1), segment[np.arange(len(winner)), winner])
    here = anywhere | (comm.size == 1)

    def slots(sequences: Ints) -> Ints:
        of, first = (np.repeat(x[sequences], count[sequences]) for x in (slot, token))
        return pool.slots(of, first + ragged_arange(count[sequences]))

    def rows(sequences: Ints) -> Ints | Tensor:
        theirs = offset
        if count[sequences].sum() < len(offset):
            at = np.repeat((count.cumsum() - count)[sequences], count[sequences]) + ragged_arange(count[sequences])
            theirs = offset[to_device(at, offset.device) if isinstance(offset, Tensor) else at]
        return batch.packed(np.repeat(chosen[sequences], count[sequences]), theirs)

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
