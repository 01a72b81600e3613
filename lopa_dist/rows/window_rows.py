"""Which rows of which sequence and branch go through the model, on this rank.

The host knows a few integers of every sequence (`HostState`), from which the ragged structure follows (`structure`).
What depends on token values (ids, masked positions, edits) stays on the device and is indexed there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from lopa_dist.decode.config import DecodeConfig
from lopa_dist.decode.state import HostState, Records, State, wanted_count
from lopa_dist.ragged import Ints
from lopa_dist.rows.forward_batch import ForwardBatch, Heads, Predictions, RowTable, Windows
from lopa_dist.rows.lookahead import Lookahead
from lopa_dist.rows.prefill import SharedPrefixes
from lopa_dist.rows.row_maker import Kept, Structures, keep
from lopa_dist.rows.share import Share
from lopa_dist.rows.structure import Kind, Structure, block_begins, make_structure, row_span
from lopa_dist.staging import to_device, together

FEW = 4  # structures are cached for at most this many sequences in flight: with more, they hardly ever repeat
MOST_STRUCTURES = 1024  # in the cache; when there are more, all are dropped


@dataclass(frozen=True)
class WindowRows:
    """The rows of masked models: each branch's window, and after it those of further kinds (`RowMaker`).

    Args:
        kinds: of rows after windows, in this order.
    """

    kinds: tuple[Kind, ...] = ()
    everywhere = 0
    in_place = False

    def layout(
        self,
        state: State,
        host: HostState,
        share: Share,
        prefixes: SharedPrefixes | None,
        lookahead: Lookahead,
        structures: Structures,
    ) -> ForwardBatch:
        """Lay out this rank's share of the next forward.

        Every rank prefills all prompts, so that their K/V need not travel. With block-causal windows the same holds for
        complete blocks, whose K/V are the same in every branch.
        """
        device, block_begin = state.canvas.device, block_begins(state.config, host)
        structure = self.find_structure(state, host, share, prefixes, structures)
        sequence, first = structure.sequence, structure.first + block_begin[structure.sequence]
        begin, stop = structure.begin + block_begin, structure.stop + block_begin
        shared = host.prompt[sequence] + first  # 0 if the first row is the prompt's first
        tail = None
        if state.config.scope.caches_masks_after:
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
        for kind in self.kinds:
            moved |= kind.offsets(structure, host, block_begin, row_minus_position)
        index = structure.on_device | together(device, **moved)
        tokens = state.canvas.view(-1).index_select(0, index["cells"])
        if structure.has_edits:
            write_edits(state, index, tokens)
        tokens, positions = tokens[:-1], index["positions"][:-1]  # [R']
        drafts = None
        for kind in self.kinds:
            drafts = kind.place(state, structure, index, tokens, positions) or drafts
        return ForwardBatch(
            table=RowTable(
                sequence=sequence, branch=structure.branch, start=structure.start, rows=structure.rows, shared=shared,
                first=first, hi=structure.hi, depth=structure.depth, tail=tail,
            ),
            tokens=tokens, positions=positions,
            heads=Heads(
                predict=partial(predict, state, structure, index, positions), slots=index["head_slot"],
                sequence=structure.head_sequence, branches=share.most(state.config.max_branches),
                columns=structure.columns,
            ),
            share=share, computed=structure.computed, prefill=structure.prefill,
            windows=Windows(begin, stop, structure.width, index.get("of_commit")), drafts=drafts,
        )  # fmt: skip

    def unpack(self, state: State, batch: ForwardBatch, gathered: Tensor) -> Records:
        """Return the records as ``[S, K, W]`` over `State.window`, with what the kinds of rows after windows add.

        A branch has a record for every position that is predicted in the anchor (`State.wanted`). Records of branches
        that did not run are zeros.
        """
        branches, windows, where = state.config.max_branches, batch.windows, batch.heads.predictions.where
        assert windows is not None
        assert where is not None
        parts = batch.share.by_branch(gathered, branches).permute(2, 0, 1)
        cells = state.slots * windows.width
        dense = gathered.new_zeros(
            len(parts), branches, cells + 1
        )  # the last one for records of no mask, see `predict`
        dense.index_copy_(2, where, parts[:, :, : len(where)])
        packed = dense[..., :cells].view(len(parts), branches, state.slots, windows.width).transpose(1, 2)
        if windows.of_commit is not None:
            first = packed[..., 0]
            torch.where(windows.of_commit[:, None], state.boundary[..., None], first, out=first)
        records = Records(packed)
        for kind in self.kinds:
            records = kind.unpack(state, batch, records, parts)
        return records

    def find_structure(
        self,
        state: State,
        host: HostState,
        share: Share,
        prefixes: SharedPrefixes | None,
        structures: Structures,
    ) -> Structure:
        """Return the structure of a forward, its indices on the device: from the cache, or made now.

        With one sequence in flight most steps find theirs there, which saves host time that the device would wait for.

        Args:
            state, host, share, prefixes, structures: as in `layout`.
        """
        config = state.config
        keeps = config.scope.prefills_apart and state.slots <= FEW
        key = (share, *shapes(config, host)) if keeps else ()
        if key in structures:
            return structures[key]
        extra = [rows for kind in self.kinds if (rows := kind.rows(config, host)).count.any()]
        made = make_structure(state, host, share, prefixes, extra)
        for kind in self.kinds:
            kind.find(state, host, made)
        made.on_device = together(state.canvas.device, **made.indices)
        if made.of_commit.any():
            made.on_device["of_commit"] = to_device(made.of_commit, state.canvas.device)
        if keeps and not made.prefill:  # the length of a prompt seldom comes again
            keep(structures, key, made, MOST_STRUCTURES)
        return made

    def kept(self, config: DecodeConfig, batch: ForwardBatch, before: HostState, after: HostState) -> Kept | None:
        """Return the rows of blocks that were complete before the last forward; with a dual cache, of whole sequences.

        Rows are the same in every branch if only one branch has run yet, or if windows are block-causal.
        """
        windows, pending = batch.windows, (before.complete > before.committed) & (before.branches > 0)
        if windows is None or not config.scope.caches_kv or not pending.any():
            return None
        stop = windows.stop if config.scope.caches_masks_after else before.complete
        count = np.where(pending, np.maximum(stop - windows.begin, 0), 0)
        anywhere = (before.committed < 0) | (config.scope.by_blocks)
        return Kept(before.prompt + windows.begin, count, anywhere)

    def in_step(self, state: State, host: HostState, lookahead: Lookahead, share: Share) -> Ints:
        """See `RowMaker`; in contexts like ``vanilla``, whose prompts run in the window's segment, their rows count."""
        begin, stop = row_span(state, host)
        rows: Ints = stop - begin + sum(kind.rows(state.config, host).count for kind in self.kinds)
        return rows * share.most(host.branches)

    def usual(self, config: DecodeConfig) -> int:
        """See `RowMaker`.

        The prompt's rows are not counted, so where they run in every step the result is far too low.
        """
        window = config.block_size * window_blocks(config) if config.scope.caches_kv else config.max_new_tokens
        return config.max_branches * self.of_branch(config, window)

    def of_branch(self, config: DecodeConfig, window: int) -> int:
        """See `RowMaker`.

        Each kind of rows is asked how many it has for a sequence with all branches and drafts, whose window is all
        masks.
        """
        most = dict.fromkeys(("end", "limit", "masked"), config.max_new_tokens)
        most |= {"branches": config.max_branches, "drafts": config.max_edits + config.max_drafts, "starts_masked": 1}
        host = HostState(*(np.array([most.get(field, 0)]) for field in HostState._fields))
        return window + int(sum(kind.rows(config, host).count[0] for kind in self.kinds))

    def apart(self, config: DecodeConfig, branches: int) -> int:
        """See `RowMaker`: none."""
        return 0

    def predictions(self, config: DecodeConfig, branches: int, window: int) -> int:
        """See `RowMaker`: one for each row."""
        return branches * self.of_branch(config, window)

    def groups(self, config: DecodeConfig) -> int:
        """See `RowMaker`: none."""
        return 0


USUAL_BLOCKS = 2
"""How many blocks a window is assumed to have if there is no bound. It affects only the sizes of buffers and tiles."""


def window_blocks(config: DecodeConfig) -> int:
    """Return how many blocks a window usually has."""
    return config.max_active_blocks or USUAL_BLOCKS


def write_edits(state: State, index: dict[str, Tensor], tokens: Tensor) -> None:
    """Write the tokens in which branches differ from the anchor into their rows.

    Args:
        state: of this step.
        index: of `Structure.indices` and `layout`, on the device.
        tokens: ``[R' + 1]``, changed in place. The last one takes the unused edits of branches.
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
    # `nonzero_static` needs a fixed size: if it finds fewer than the host counted, the rest is a cell that nobody reads
    nowhere = state.slots * structure.width
    wanted = state.wanted(structure.width).view(-1)
    where = torch.nonzero_static(wanted, size=structure.wanted, fill_value=nowhere)[:, 0]
    found = where.index_select(0, index["number"])
    rows = (index["row_minus_cell"] + found).clamp_(max=len(positions) - 1)  # in range for `nowhere`, too
    extra_rows = index["extra_rows"]
    if len(extra_rows):
        rows = torch.cat([rows, extra_rows])
    keys = None
    if state.sampled.any():
        of_head = to_device(structure.head_sequence, positions.device)
        of_window, of_extra = of_head[: len(found)], of_head[len(found) :]
        predicted = positions[extra_rows] - state.prompt[of_extra] + int(state.vocabulary.shift)
        predicted = torch.cat([state.complete[of_window] + found % structure.width, predicted])
        keys = state.noise_keys(of_head, predicted)
    return Predictions(rows, keys, where)


def shapes(config: DecodeConfig, host: HostState) -> Iterator[tuple[int, ...]]:
    """Yield the numbers of each sequence from which a structure and its `Kind`s follow; () if it does not run."""
    fields = "branches", "starts_masked", "committed", "complete", "end", "suffix"
    for drafts, wanted, branches, first, committed, complete, end, suffix in zip(
        np.minimum(host.drafts, config.drafts).tolist(),
        wanted_count(config, host).tolist(),
        *(getattr(host, field).tolist() for field in fields),
        strict=True,
    ):
        begin = complete - complete % config.block_size  # see `block_begins`
        # `committed` is -1 where a prompt waits; where blocks have one token, distances alone do not tell it from a
        # committed block
        known = committed < 0, committed > 0, committed - begin, complete - begin, end - begin, suffix
        yield (branches, drafts, wanted, first, *known) if branches else ()
