"""The shape of a causal model's forward in C: the same as `causal_rows.shape_of`'s, in a few microseconds."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import numpy as np

from lopa_dist.c_library import INT, LONG, P, load_or_why, memory
from lopa_dist.decode.state import HostState
from lopa_dist.ragged import Ints
from lopa_dist.rows.lookahead import Lookahead

SOURCE = Path(__file__).with_name("chain_shape.c")
FUNCTIONS = {"chain_shape": (None, (LONG, P, LONG, LONG, P, P, P, INT, LONG, LONG, LONG, LONG, LONG, P, P, P, P))}


@cache
def found() -> ctypes.CDLL | str:
    """Return the C library, or why there is none."""
    return load_or_why(SOURCE, FUNCTIONS)


def chain_shape(
    library: ctypes.CDLL, host: HostState, lookahead: Lookahead, prompts: Ints, common: int, masks: Ints, group: int
) -> tuple[Ints, Ints, Ints, Ints]:
    """Return what `chain_shape` in C writes: of segments ``[8, G]``, rows ``[5, R]``, heads ``[4, H]`` and masks.

    Args:
        library: as `found`.
        host, lookahead: of the step; no sequence has more than one branch.
        prompts: ``[3, n]`` sequence, place of the first row, and number of rows of each prompt's segment.
        common: rows of all chains and their groups.
        masks: of `RowCounts`.
        group: of `ChainCells`.
    """
    of_groups = int(np.count_nonzero(masks)) if lookahead.masks else 0
    of_masks = np.empty(int(masks.sum()) + of_groups * lookahead.blocks if of_groups else 0, np.int64)
    segments = prompts.shape[1] + int(np.count_nonzero(host.branches)) + of_groups
    sizes = segments, int(prompts[2].sum()) + common, common - lookahead.lead * of_groups  # what leads predicts nothing
    of_segments, of_rows, of_heads = (
        np.empty((fields, size), np.int64) for fields, size in zip((8, 5, 4), sizes, strict=True)
    )
    library.chain_shape(
        prompts.shape[1], memory(prompts),
        len(masks), masks.shape[1], memory(host.branches), memory(host.drafts), memory(masks),
        lookahead.blocks, lookahead.lead, group, *sizes,
        memory(of_segments), memory(of_rows), memory(of_heads), memory(of_masks),
    )  # fmt: skip
    return of_segments, of_rows, of_heads, of_masks
