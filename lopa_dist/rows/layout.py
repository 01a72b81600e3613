"""Which rows of which sequence and branch go through the model, on this rank.

The host knows a few integers of every sequence (`HostState`), from which the ragged structure follows (`structure`).
What depends on token values (ids, masked positions, edits) stays on the device and is indexed there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from lopa_dist.decode.config import DecodeConfig
from lopa_dist.decode.state import HostState, Records, State, wanted_count
from lopa_dist.ragged import Ints, to_device, together
from lopa_dist.rows.draft_rows import add_draft_rows, draft_keys, drafts_with_rows, place_drafts
from lopa_dist.rows.forward_batch import ForwardBatch
from lopa_dist.rows.prefill import SharedPrefixes
from lopa_dist.rows.structure import Structure, origins, window_structure

FEW = 4  # structures are cached for at most this many sequences in flight: with more, they hardly ever repeat
MOST_KEPT = 1024  # structures; when there are more, all are dropped


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
    device, origin = state.canvas.device, origins(state.config, host)
    structure = find_structure(state, host, rank, ranks, prefixes, {} if structures is None else structures, origin)
    sequence, first = structure.sequence, structure.first + origin[structure.sequence]
    shared = host.prompt[sequence] + first  # 0 if the first row is the prompt's first
    tail = None
    if state.config.stores_kv_behind:
        behind = structure.behind + origin[sequence]
        tail = host.prompt[sequence] + behind, (host.limit + host.suffix)[sequence] - behind

    # to the device in one transfer: what depends on where the windows are
    at = structure.row_sequence
    moved = {
        "cells": structure.row_cell + origin[at],
        "positions": structure.row_position + (origin + host.prompt)[at],
        "offset": structure.start - first,  # a position's row = this + the position
    }
    if structure.draft_begin is not None:
        moved["draft_begin"] = structure.draft_begin + origin
    on = structure.on | together(device, **moved)
    cells, positions = on["cells"], on["positions"]
    padded = len(cells) - 1
    tokens = state.canvas.view(-1).index_select(0, cells)
    edited, token = state.edits.flatten(1, 2).index_select(1, on["edits"])  # [G, E] positions, tokens
    row = edited + on["offset"][:, None]
    row = torch.where(edited >= 0, row, padded)
    tokens.scatter_(0, row.view(-1), token.view(-1))
    tokens, positions = tokens[:padded], positions[:padded]
    # `nonzero_static` needs a fixed size: with fewer than the host counted, the rest is a cell that nobody reads
    nowhere = state.slots * structure.width
    wanted = state.wanted(structure.width).view(-1)
    where = torch.nonzero_static(wanted, size=structure.wanted, fill_value=nowhere)[:, 0]
    found = where.index_select(0, on["entry"])
    head_rows = (on["base"] + found).clamp_(max=padded - 1)  # in range for `nowhere`, too
    keys, drafts = None, None
    if state.sampled.any():
        heads = to_device(structure.head_sequence[: len(found)], device)
        keys = state.noise_keys(heads, state.complete[heads] + found % structure.width)
    if structure.draft_begin is not None:
        drafts = place_drafts(state, on, tokens, positions)
        head_rows = torch.cat([head_rows, on["check_head"]])
        keys = None if keys is None else torch.cat([keys, draft_keys(state, structure, on)])
    return ForwardBatch(
        sequence=sequence, branch=structure.branch, start=structure.start, rows=structure.rows, shared=shared,
        first=first, hi=structure.hi, depth=structure.depth, tail=tail, begin=structure.begin + origin,
        stop=structure.stop + origin, prefill=structure.prefill, tokens=tokens, positions=positions,
        head_rows=head_rows, head_slots=on["slot"], head_sequence=structure.head_sequence, head_keys=keys,
        local_branches=-(-state.config.max_branches // ranks), columns=structure.columns, where=where,
        width=structure.width, of_commit=on.get("of_commit"), drafts=drafts,
    )  # fmt: skip


def find_structure(
    state: State,
    host: HostState,
    rank: int,
    ranks: int,
    prefixes: SharedPrefixes | None,
    structures: Structures,
    origin: Ints,
) -> Structure:
    """Return the structure of a forward, its arrays on the device: from the cache, or made now.

    With one sequence in flight most steps find theirs there, which saves host time that the device would wait for.

    Args:
        state, host, rank, ranks, prefixes, structures: as of `layout`.
        origin: `origins`.
    """
    config = state.config
    keeps = config.keeps_kv and state.slots <= FEW
    key = (rank, ranks, *shapes(config, host)) if keeps else ()
    if key in structures:
        return structures[key]
    extra = drafts_with_rows(config, host)
    made = window_structure(state, host, rank, ranks, prefixes, origin, extra)
    if extra.any():
        add_draft_rows(state, host, made, origin, extra, ranks)
    made.on = together(state.canvas.device, **made.arrays)
    if made.of_commit.any():
        made.on["of_commit"] = to_device(made.of_commit, state.canvas.device)
    if keeps and not made.prefill:  # the length of a prompt seldom comes again
        if len(structures) >= MOST_KEPT:
            structures.clear()
        structures[key] = made
    return made


def shapes(config: DecodeConfig, host: HostState) -> Iterator[tuple[int, ...]]:
    """Yield the numbers of each sequence that determine a structure, from its origin; () if it does not run."""
    drafted = drafts_with_rows(config, host)
    fields = "branches", "first_masked", "committed", "complete", "end", "limit", "suffix"
    for drafts, wanted, branches, first, committed, complete, end, limit, suffix in zip(
        drafted.tolist(),
        wanted_count(config, host).tolist(),
        *(getattr(host, field).tolist() for field in fields),
        strict=True,
    ):
        origin = complete - complete % config.block_size
        last = limit - origin if config.canvas == "whole" else 0
        known = committed > 0, committed - origin, complete - origin, end - origin, last, suffix
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
    branches, masked = state.config.max_branches, len(batch.where)
    parts = gathered.permute(3, 1, 0, 2).flatten(1, 2)[:, :branches]  # branch j lies at rank j mod ranks, j div ranks
    cells = state.slots * batch.width
    dense = gathered.new_zeros(len(parts), branches, cells + 1)  # one for records of no mask, see `layout`
    dense.index_copy_(2, batch.where, parts[:, :, :masked])
    packed = dense[..., :cells].view(len(parts), branches, state.slots, batch.width).transpose(1, 2)
    if batch.of_commit is not None:
        first = packed[..., 0]
        torch.where(batch.of_commit[:, None], state.boundary.packed[..., None], first, out=first)
    if not state.config.drafts:
        return Records(packed)
    return Records(packed, unpack_drafts(state, batch, packed, parts[:, :, masked:]))


def unpack_drafts(state: State, batch: ForwardBatch, packed: Tensor, verified: Tensor) -> Records:
    """Return what the forward predicts for each draft in the context of the drafts before it, ``[S, K x m]``.

    The first draft of a branch takes the branch's own record. So do drafts whose predicting row cannot be changed by
    other drafts, and was therefore not computed again. The others take the record of their verification row.

    Args:
        state, batch: of this step.
        packed: ``[size, S, K, W]`` the branches' records.
        verified: ``[size, K, n]`` records of the verification rows of all sequences.
    """
    m, slots, width = state.config.drafts, state.slots, packed.shape[-1]
    position = state.chain[0].view(slots, -1, m)  # [S, K, m]
    offset = (position - state.complete[:, None, None]).clamp(0, width - 1)  # in range also if a branch has no draft
    size = len(packed)
    drafts = packed.gather(3, offset.expand(size, -1, -1, -1))
    if batch.drafts is not None:
        dense = verified.new_zeros(size, verified.shape[1], slots * (m - 1))
        dense.index_copy_(2, batch.drafts.where, verified)
        rows = dense.view(size, -1, slots, m - 1).transpose(1, 2)  # [size, S, K, m - 1]
        has_row = position[..., 1:] - int(state.vocabulary.shift) >= batch.drafts.begin[:, None, None]
        drafts[..., 1:] = torch.where(has_row, rows, drafts[..., 1:])
    return Records(drafts.flatten(2))
