"""Which rows of a causal model run, and what they see.

Of a sequence whose pending token is the c-th, with m drafts and groups of n masks:

    row         pending   d_1 ... d_m       group behind d_i (i = 0: pending)
    place       c         c+1 ... c+m       c+i+1 ... c+i+n
    predicts    c+1       c+2 ... c+m+1     c+i+2 ... c+i+n+1
    sees        0 ... c   0 ... its own     0 ... c+i, and its group up to itself

K/V of tokens are written into the pool where they belong, before attention: accepting a token moves a frontier, and
rejecting it leaves what the next forward overwrites. K/V of masks lie in scratch. A prompt's rows run in the forward of
its sequence's first step, in front; its last token is the first pending one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from lopa_dist.decode.state import HostState, Records, State
from lopa_dist.ragged import Ints, padded, ragged_arange, together
from lopa_dist.rows.forward_batch import CausalRows, ForwardBatch
from lopa_dist.rows.prefill import Prefill, SharedPrefixes


@dataclass(frozen=True)
class Lookahead:
    """How far a forward looks ahead; no text depends on it."""

    masks: int  # of a group
    depths: tuple[int, ...] | None = None  # of the chain that have a group; None: the last one alone


def row_counts(host: HostState, lookahead: Lookahead) -> tuple[Ints, Ints]:
    """Return how many masks stand behind each depth of each sequence's chain, and the rows of each sequence.

    Args:
        host: of the step.
        lookahead: what it asks for. Masks are left out where nothing could verify their predictions before the limit,
            and behind an end-of-text.

    Returns:
        Masks ``[S, D]``, and rows ``[S]``, those of prompts not included.
    """
    running = host.branches > 0
    depth = np.arange(int((host.drafts * running).max(initial=0)) + 1)
    last = depth == host.drafts[:, None]
    wanted = last if lookahead.depths is None else np.isin(depth, lookahead.depths) | last
    wanted &= (depth <= (host.drafts - host.ends)[:, None]) & running[:, None]
    # the mask at place p predicts p + 1, which is verified by the row at p + 1 if that is not the answer's last
    most = host.limit[:, None] - 2 - (host.complete[:, None] + depth)
    masks = np.clip(most, 0, lookahead.masks) * wanted
    return masks, (host.drafts + 1) * running + masks.sum(1)


def prompt_rows(host: HostState, prefixes: SharedPrefixes) -> int:
    """Return how many rows of prompts run in the next forward."""
    waiting = (host.committed < 0) & (host.branches > 0)
    computed = prefixes.source == np.arange(len(waiting))
    return int((host.prompt - prefixes.length)[waiting].sum() + prefixes.length[waiting & computed].sum())


def layout(state: State, host: HostState, lookahead: Lookahead, prefixes: SharedPrefixes | None = None) -> ForwardBatch:
    """Lay out the next forward. All branch ranks compute the same, so that each has all K/V.

    Args:
        state, host: the state and its host copy, of the same step.
        lookahead: of this step, the same on all ranks.
        prefixes: what prompts share; None where no prompt waits.
    """
    masks, _ = row_counts(host, lookahead)
    running = np.flatnonzero(host.branches > 0)
    waiting = (host.committed < 0) & (host.branches > 0)
    length = prefixes.length if prefixes else np.zeros_like(host.prompt)
    source = prefixes.source if prefixes else np.full_like(host.prompt, -1)
    slots = np.arange(len(host.prompt))
    prefix, suffix = np.flatnonzero(waiting & (source == slots)), np.flatnonzero(waiting & (host.prompt > length))
    of_group, group_depth = np.nonzero(masks)
    pending = host.prompt + host.complete - 1  # [S] its place, counted from the prompt's first token

    # segments: prefixes of prompts, the rests of prompts, chains, groups of masks
    sequence = np.concatenate([prefix, suffix, running, of_group])
    first = np.concatenate([0 * prefix, length[suffix], pending[running], pending[of_group] + group_depth + 1])
    rows = np.concatenate([
        length[prefix], (host.prompt - length)[suffix], host.drafts[running] + 1, masks[of_group, group_depth],
    ])  # fmt: skip
    start = rows.cumsum() - rows
    prompts, chains = len(prefix) + len(suffix), len(prefix) + len(suffix) + len(running)
    place = first.repeat(rows) + ragged_arange(rows)
    tokens_end, total = int(rows[:chains].sum()), int(rows.sum())  # rows of masks come last
    begin = int(rows[:prompts].sum())
    behind = np.where(np.arange(len(rows)) < chains, first + rows, first)  # cached tokens that a segment sees
    seen = place + 1
    seen[tokens_end:] = behind.repeat(rows)[tokens_end:]
    hi = np.zeros(total, np.int64)
    hi[tokens_end:] = ragged_arange(rows[chains:]) + 1

    # to the device in one transfer
    of_row = sequence.repeat(rows)
    cells = np.zeros(padded(max(total, 1)), np.int64)
    cells[:tokens_end] = (of_row * state.canvas.shape[1] + state.origin + place - host.prompt[of_row])[:tokens_end]
    positions = np.zeros(len(cells), np.int64)
    positions[:total] = place
    depths, group = masks.shape[1], max(int(masks.max(initial=0)), 1)
    head_sequence = of_row[begin:]
    on = together(
        state.canvas.device, cells=cells, positions=positions, head_rows=np.arange(begin, total),
        head_sequence=head_sequence, predicted=(place - host.prompt[of_row] + 1)[begin:],
        tokens=of_row[begin:tokens_end] * depths + ragged_arange(rows[prompts:chains]),
        masks=((of_group * depths + group_depth) * group).repeat(rows[chains:]) + ragged_arange(rows[chains:]),
    )  # fmt: skip
    tokens = state.canvas.view(-1).index_select(0, on["cells"])
    tokens[tokens_end:total] = state.vocabulary.mask_id
    tokens[total:] = 0  # padding; a model without masks has no embedding of its mask id
    keys = state.noise_keys(on["head_sequence"], on["predicted"]) if state.sampled.any() else None
    none = np.full(len(slots), -1)
    prefill = Prefill(
        sequence[:prompts], first[:prompts], behind[:prompts], len(prefix), waiting, prefix_row=none, suffix_row=none
    )
    return ForwardBatch(
        sequence=sequence, branch=np.where(np.arange(len(rows)) < prompts, -1, 0), start=start, rows=rows,
        shared=behind, first=first - host.prompt[sequence], lo=np.zeros(total, np.int64), hi=hi, tail=None,
        begin=host.complete - 1, stop=host.complete + host.drafts, prefill=prefill if prompts else None,
        tokens=tokens, positions=on["positions"], head_rows=on["head_rows"],
        head_slots=on["head_rows"] - begin, head_sequence=head_sequence, head_keys=keys, local_branches=1,
        columns=total - begin, where=on["tokens"], width=depths, stale=None, drafts=None,
        seen=seen, place=np.where(np.arange(total) < tokens_end, place, -1),
        causal=CausalRows(on["tokens"], on["masks"], depths, group),
    )  # fmt: skip


def unpack(state: State, batch: ForwardBatch, gathered: Tensor) -> Records:
    """Spread the first rank's records: ``[S, D]`` of chains, and of groups ``[S, D, n]``, with token -1 for no mask.

    Args:
        state, batch: of this step.
        gathered: ``[ranks, 1, columns, 3]`` int32.
    """
    found = batch.causal
    assert found is not None
    records = gathered[0, 0].T  # [3, columns]
    verified = records.new_zeros(3, state.slots * found.depths)
    verified.index_copy_(1, found.tokens, records[:, : len(found.tokens)])
    drafted = records.new_full((3, state.slots * found.depths * found.group), -1)
    drafted.index_copy_(1, found.masks, records[:, len(found.tokens) :])
    groups = Records(drafted.view(3, state.slots, found.depths, found.group))
    return Records(verified.view(3, state.slots, found.depths), groups)
