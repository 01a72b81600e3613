"""Which rows of which sequence and branch go through the model, on this rank.

The host knows a few integers of every sequence (`HostState`), from which the ragged structure follows (`structure`).
What depends on token values (ids, masked positions, edits) stays on the device and is indexed there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from lopa_dist.decode.config import DecodeConfig
from lopa_dist.decode.state import HostState, Records, State, wanted_count
from lopa_dist.ragged import to_device, together
from lopa_dist.rows.draft_rows import add_draft_indices, draft_offsets, draft_rows, place_drafts
from lopa_dist.rows.forward_batch import ForwardBatch, Predictions
from lopa_dist.rows.prefill import SharedPrefixes
from lopa_dist.rows.structure import RowsBehind, Structure, block_begins, make_structure

FEW = 4  # structures are cached for at most this many sequences in flight: with more, they hardly ever repeat
MOST_STRUCTURES = 1024  # in the cache; when there are more, all are dropped

KINDS: tuple[Callable[[DecodeConfig, HostState], RowsBehind], ...] = (draft_rows,)
"""The kinds of rows that stand behind windows, in this order: for each, the function that says how many there are.

To add a kind, write its function and put it before `draft_rows`, which must be last: `unpack_drafts` takes the last
records. Rows of drafts see the rows before them, unless these have an `until` of 1.

Structures are cached, so the function may read of each sequence what `shapes` yields and nothing else. It must return
the most rows for a sequence with all branches and drafts, because `sizes.most_branch_rows` asks for these.

Rows that hold another token than the canvas does are filled in on the device, as `place_drafts` does for drafts, and
records of a kind are dropped unless `unpack` reads them.
"""

Structures: TypeAlias = dict[tuple[object, ...], Structure]
"""Structures of earlier steps, by what they follow from."""


def layout(
    state: State,
    host: HostState,
    rank: int = 0,
    ranks: int = 1,
    prefixes: SharedPrefixes | None = None,
    structures: Structures | None = None,
) -> ForwardBatch:
    """Lay out this rank's share of the next forward: branch j runs on rank j mod `ranks`.

    A prompt is prefilled by every rank, so that its K/V need not travel; with block-causal windows the same holds for
    complete blocks, whose K/V are the same in every branch.

    Args:
        state, host: the state and its host copy, of the same step.
        rank, ranks: of the branch group.
        prefixes: what prompts share; None if they share nothing.
        structures: of earlier steps with the same slots; gets this one's. None: none is looked up.
    """
    device, block_begin = state.canvas.device, block_begins(state.config, host)
    structure = find_structure(state, host, rank, ranks, prefixes, {} if structures is None else structures)
    sequence, first = structure.sequence, structure.first + block_begin[structure.sequence]
    begin, stop = structure.begin + block_begin, structure.stop + block_begin
    shared = host.prompt[sequence] + first  # 0 if the first row is the prompt's first
    tail = None
    if state.config.stores_kv_behind:
        tail = (host.prompt + stop)[sequence], (host.limit + host.suffix - stop)[sequence]

    # to the device in one transfer: what depends on where the windows are
    at, cell = structure.row_sequence, np.arange(state.slots) * state.canvas.shape[1] + state.origin
    moved = {
        "cells": structure.row_position + (block_begin + cell)[at],
        "positions": structure.row_position + (block_begin + host.prompt)[at],
    }
    row_minus_position = structure.start - first  # [G]
    if structure.has_edits:
        moved["row_minus_position"] = row_minus_position
    if structure.drafts is not None:
        moved |= draft_offsets(structure.drafts, host, block_begin, row_minus_position)
    index = structure.on_device | together(device, **moved)
    tokens = state.canvas.view(-1).index_select(0, index["cells"])
    if structure.has_edits:
        write_edits(state, index, tokens)
    tokens, positions = tokens[:-1], index["positions"][:-1]  # [R']
    drafts = None if structure.drafts is None else place_drafts(state, index, tokens, positions)
    return ForwardBatch(
        sequence=sequence, branch=structure.branch, start=structure.start, rows=structure.rows, shared=shared,
        first=first, hi=structure.hi, depth=structure.depth, tail=tail, begin=begin,
        stop=stop, prefill=structure.prefill, tokens=tokens, positions=positions,
        predict=partial(predict, state, structure, index, positions),
        head_slots=index["head_slot"], head_sequence=structure.head_sequence,
        local_branches=-(-state.config.max_branches // ranks), columns=structure.columns,
        width=structure.width, computed=structure.computed, of_commit=index.get("of_commit"), drafts=drafts,
    )  # fmt: skip


def write_edits(state: State, index: dict[str, Tensor], tokens: Tensor) -> None:
    """Write the tokens in which branches differ from the anchor into their rows.

    Args:
        state: of this step.
        index: of `Structure.indices` and `layout`, on the device.
        tokens: ``[R' + 1]``, changed in place. The last one takes the edits that a branch does not have.
    """
    position, token = state.edits.flatten(1, 2).index_select(1, index["edit_cell"])  # [G, E] each
    row = torch.where(position >= 0, position + index["row_minus_position"][:, None], len(tokens) - 1)
    tokens.scatter_(0, row.view(-1), token.view(-1))


def predict(state: State, structure: Structure, index: dict[str, Tensor], positions: Tensor) -> Predictions:
    """Return which rows predict, and what.

    Args:
        state, structure: of the forward.
        index: of `Structure.indices` and `layout`, on the device.
        positions: ``[R']``.
    """
    # `nonzero_static` needs a fixed size: with fewer than the host counted, the rest is a cell that nobody reads
    nowhere = state.slots * structure.width
    wanted = state.wanted(structure.width).view(-1)
    where = torch.nonzero_static(wanted, size=structure.wanted, fill_value=nowhere)[:, 0]
    found = where.index_select(0, index["number"])
    rows = (index["row_minus_cell"] + found).clamp_(max=len(positions) - 1)  # in range for `nowhere`, too
    rows_behind = index["rows_behind"]
    if len(rows_behind):
        rows = torch.cat([rows, rows_behind])
    keys = None
    if state.sampled.any():
        of_head = to_device(structure.head_sequence, positions.device)
        of_window, of_behind = of_head[: len(found)], of_head[len(found) :]
        predicted = positions[rows_behind] - state.prompt[of_behind] + int(state.vocabulary.shift)
        predicted = torch.cat([state.complete[of_window] + found % structure.width, predicted])
        keys = state.noise_keys(of_head, predicted)
    return Predictions(rows, keys, where)


def find_structure(
    state: State,
    host: HostState,
    rank: int,
    ranks: int,
    prefixes: SharedPrefixes | None,
    structures: Structures,
) -> Structure:
    """Return the structure of a forward, its indices on the device: from the cache, or made now.

    With one sequence in flight most steps find theirs there, which saves host time that the device would wait for.

    Args:
        state, host, rank, ranks, prefixes, structures: as of `layout`.
    """
    config = state.config
    keeps = config.prefills_apart and state.slots <= FEW
    key = (rank, ranks, *shapes(config, host)) if keeps else ()
    if key in structures:
        return structures[key]
    behind = [rows for kind in KINDS if (rows := kind(config, host)).count.any()]
    made = make_structure(state, host, rank, ranks, prefixes, behind)
    add_draft_indices(state, host, made)
    made.on_device = together(state.canvas.device, **made.indices)
    if made.of_commit.any():
        made.on_device["of_commit"] = to_device(made.of_commit, state.canvas.device)
    if keeps and not made.prefill:  # the length of a prompt seldom comes again
        if len(structures) >= MOST_STRUCTURES:
            structures.clear()
        structures[key] = made
    return made


def shapes(config: DecodeConfig, host: HostState) -> Iterator[tuple[int, ...]]:
    """Yield the numbers of each sequence that determine a structure, `KINDS` too; () if the sequence does not run."""
    fields = "branches", "starts_masked", "committed", "complete", "end", "suffix"
    for drafts, wanted, branches, first, committed, complete, end, suffix in zip(
        np.minimum(host.drafts, config.drafts).tolist(),
        wanted_count(config, host).tolist(),
        *(getattr(host, field).tolist() for field in fields),
        strict=True,
    ):
        begin = complete - complete % config.block_size  # see `block_begins`
        known = committed > 0, committed - begin, complete - begin, end - begin, suffix
        yield (branches, drafts, wanted, first, *known) if branches else ()


def unpack(state: State, batch: ForwardBatch, gathered: Tensor) -> Records:
    """Spread gathered records over ``[S, K, W]`` of `State.window`, and records of drafts over ``[S, K x m]``.

    A branch has a record for every position that is predicted in the anchor (`State.wanted`). Branches that did not run
    have zeros.

    Args:
        state, batch: of this step.
        gathered: ``[ranks, local_branches, columns, n]`` int32: token, bits of probability and confidence, and so on
            (`Records`).
    """
    branches = state.config.max_branches
    parts = gathered.permute(3, 1, 0, 2).flatten(1, 2)[:, :branches]  # branch j lies at rank j mod ranks, j div ranks
    cells = state.slots * batch.width
    dense = gathered.new_zeros(len(parts), branches, cells + 1)  # the last one for records of no mask, see `predict`
    where = batch.predictions.where
    assert where is not None
    dense.index_copy_(2, where, parts[:, :, : len(where)])
    packed = dense[..., :cells].view(len(parts), branches, state.slots, batch.width).transpose(1, 2)
    if batch.of_commit is not None:
        first = packed[..., 0]
        torch.where(batch.of_commit[:, None], state.boundary[..., None], first, out=first)
    if not state.config.drafts:
        return Records(packed)
    return Records(packed, unpack_drafts(state, batch, packed, parts))


def unpack_drafts(state: State, batch: ForwardBatch, packed: Tensor, parts: Tensor) -> Records:
    """Return what the forward predicts for each draft in the context of the drafts before it, ``[S, K x m]``.

    The first draft of a branch takes the branch's own record. So do drafts whose predicting row sees no drafts: no
    other draft can change what it predicts. The others take the record of their verification row.

    Args:
        state, batch: of this step.
        packed: ``[size, S, K, W]`` the branches' records.
        parts: ``[size, K, columns]`` all records; those of verification rows come last.
    """
    m, slots, width = state.config.drafts, state.slots, packed.shape[-1]
    position = state.chain_position.view(slots, -1, m)  # [S, K, m]
    offset = (position - state.complete[:, None, None]).clamp(0, width - 1)  # in range also if a branch has no draft
    size = len(packed)
    drafts = packed.gather(3, offset.expand(size, -1, -1, -1))
    if batch.drafts is not None:
        verified = parts[:, :, -len(batch.drafts.cell) :]
        dense = verified.new_zeros(size, verified.shape[1], slots * (m - 1))
        dense.index_copy_(2, batch.drafts.cell, verified)
        rows = dense.view(size, -1, slots, m - 1).transpose(1, 2)  # [size, S, K, m - 1]
        sees_drafts = position[..., 1:] - int(state.vocabulary.shift) >= batch.drafts.sees_from[:, None, None]
        drafts[..., 1:] = torch.where(sees_drafts, rows, drafts[..., 1:])
    return Records(drafts.flatten(2))
