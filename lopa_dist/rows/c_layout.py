"""The layout of a causal model's forward in C: the same as numpy's (`rows.chain_layout`), in a few microseconds."""

from __future__ import annotations

import ctypes
from functools import cache
from itertools import accumulate
from pathlib import Path

import numpy as np

from lopa_dist.c_library import LONG, P, load_or_why, memory
from lopa_dist.decode.state import HostState, State
from lopa_dist.ragged import ROW_TILE, padded
from lopa_dist.rows.chain_layout import Layout, RowCounts, own_paths
from lopa_dist.rows.lookahead import Lookahead
from lopa_dist.rows.prefill import Prefill
from lopa_dist.rows.share import Share

SOURCE = Path(__file__).with_name("chain_layout.c")
FUNCTIONS = {
    "chain_counts": (None, (LONG, *[P] * 5, LONG, LONG, LONG, P, LONG, *[P] * 5)),
    "chain_layout": (None, (LONG, P, P, P, LONG, LONG, *[P] * 6, *[LONG] * 4, P, *[LONG] * 8, P)),
}
NOTHING = np.zeros(0, np.int64)
TOTALS, SIZES = 5, 6  # how many numbers the two functions in C write before their arrays
FOR_DEVICE = (
    "canvas_cells", "positions", "heads", "columns", "head_sequence", "predicted", "cells", "masks", "path_cells",
    "drafts", "chain_cells",
)  # fmt: skip


@cache
def found() -> ctypes.CDLL | str:
    """Return the C library, or why there is none."""
    return load_or_why(SOURCE, FUNCTIONS)


def row_counts(library: ctypes.CDLL, host: HostState, lookahead: Lookahead) -> RowCounts:
    """Return what `row_counts_plain` does; `library` is the one that was `found`."""
    slots, most = len(host.drafts), int(host.drafts.max(initial=0)) + 1
    made = np.empty(TOTALS + slots * (2 + most), np.int64)
    common, path = made[TOTALS : TOTALS + 2 * slots].reshape(2, slots)
    masks = made[TOTALS + 2 * slots :]
    also = np.array(lookahead.depths, np.int64) if lookahead.depths else NOTHING
    width, has_group = 0, None
    if lookahead.has_group is not None:
        width, has_group = lookahead.has_group.shape[1], memory(lookahead.has_group)
    library.chain_counts(
        slots, memory(host.branches), memory(host.drafts), memory(host.expects_eos), memory(host.limit),
        memory(host.complete), lookahead.masks, lookahead.lead, len(also), memory(also), width, has_group,
        memory(made), memory(masks), memory(common), memory(path),
    )  # fmt: skip
    group, depths, groups, rows, of_paths = made[:TOTALS].tolist()
    return RowCounts(masks[: slots * depths].reshape(slots, depths), common, path, group, groups, rows, of_paths)


def lay_out(
    library: ctypes.CDLL,
    state: State,
    host: HostState,
    share: Share,
    lookahead: Lookahead,
    prefill: Prefill | None,
    counts: RowCounts,
) -> Layout:
    """Return what `lay_out_plain` does; `library` is the one that was `found`."""
    config, sequences, depths = state.config, *counts.masks.shape
    prompts, own, width, rows = (NOTHING,) * 3, NOTHING, counts.width, counts.rows
    if prefill:
        prompts = prefill.sequence, prefill.first, prefill.stop
        rows += int((prefill.stop - prefill.first).sum())
    if width:
        own = own_paths(config, share)
        rows += len(own) * width
    segments, drafts = len(prompts[0]) + counts.groups + sequences * (1 + len(own)), len(own) * width
    room = 6 * segments, 3 * rows, 2 * (rows + ROW_TILE), 4 * rows, rows, rows, width, 2 * drafts
    begin = [*accumulate(room, initial=SIZES)]
    made = np.empty(begin[-1], np.int64)
    library.chain_layout(
        len(prompts[0]), *map(memory, prompts),
        sequences, depths, memory(host.prompt), memory(host.complete), memory(host.branches), memory(host.drafts),
        memory(counts.masks), memory(counts.path), lookahead.blocks, lookahead.lead, counts.group,
        len(own), memory(own), config.max_branches, config.max_drafts, width,
        state.canvas.shape[1], state.origin, segments, rows, ROW_TILE, memory(made),
    )  # fmt: skip
    num_segments, num_rows, num_heads, common, num_masks, num_drafts = made[:SIZES].tolist()
    sequence, branch, start, length, shared, first = made[begin[0] : begin[1]].reshape(6, -1)[:, :num_segments]
    hi, seen, place = made[begin[1] : begin[2]].reshape(3, -1)[:, :num_rows]
    of_padded = made[begin[2] : begin[3]].reshape(2, -1)[:, : padded(max(num_rows, 1))]
    of_heads = made[begin[3] : begin[4]].reshape(4, -1)[:, :num_heads]
    cells, masks = made[begin[4] : begin[4] + common], made[begin[5] : begin[5] + num_masks]
    path_cells, of_drafts = made[begin[6] : begin[7]], made[begin[7] :].reshape(2, -1)[:, :num_drafts]
    for_device = *of_padded, *of_heads, cells, masks, path_cells, *of_drafts
    return Layout(
        sequence, branch, start, length, shared, first, hi, seen, place,
        common + share.most(config.max_branches) * width, depths, counts.group,
        dict(zip(FOR_DEVICE, for_device, strict=True)),
    )  # fmt: skip
