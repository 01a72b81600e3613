"""Which rows of a causal model run, and what they see.

For a sequence whose pending token is the c-th, with m drafts and groups of n masks:

    row         pending   d_1 ... d_m       group behind d_i (i = 0: pending)
    place       c         c+1 ... c+m       c+i+1 ... c+i+n
    predicts    c+1       c+2 ... c+m+1     c+i+2 ... c+i+n+1
    sees        0 ... c   0 ... its own     0 ... c+i, and its group up to itself

Where masks see one another (`Lookahead.blocks`, linear self-speculation of arXiv 2607.05722), a group is a block:

    row         copy of d_i   mask for the next pending token   n masks
    place       c+i           c+i+1                             c+i+2 ... c+i+n+1
    predicts    nothing       nothing: d_i's own row does       c+i+2 ... c+i+n+1, each its own place
    sees        all: 0 ... c+i-1, and all of the block

The copy is there because d_i's own row, which verifies, does not see the masks.

K/V of tokens are written to their place in the pool before attention. Accepting a token only moves a frontier; the
K/V of a rejected one are overwritten by the next forward. K/V of masks lie in scratch. A prompt's rows run in the
forward of its sequence's first step, in front; its last token is the first pending one.

A branch beside the chain (`decode.tree`) is one more segment behind the pending token: its drafts and a group of n
masks behind them, all in scratch. Branch ranks share these branches; all other rows run on every rank, so that each has
all K/V. If such a branch wins, `engine.commit` moves the K/V of its accepted tokens into the pool.
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
    blocks: bool = False  # whether a group's masks predict their own places (`ModelConfig.block_drafts`)

    @property
    def lead(self) -> int:
        """Return how many rows of a group predict nothing. They stand in front of the masks whose predictions count."""
        return 2 * self.blocks


def row_counts(host: HostState, lookahead: Lookahead) -> tuple[Ints, Ints, Ints]:
    """Return how many masks stand behind each depth of each sequence's chain, and the rows of each sequence.

    Args:
        host: of the step.
        lookahead: the masks that are wanted. Masks are left out if nothing could verify their predictions before the
            limit, and behind an end-of-text.

    Returns:
        Masks ``[S, D]`` whose predictions count; rows ``[S]`` of the chain and its groups, without prompts; and rows
        ``[S]`` of each branch beside it.
    """
    running = host.branches > 0
    depth = np.arange(int((host.drafts * running).max(initial=0)) + 1)
    last = depth == host.drafts[:, None]
    wanted = last if lookahead.depths is None else np.isin(depth, lookahead.depths) | last
    wanted &= (depth <= (host.drafts - host.ends)[:, None]) & running[:, None]
    # the first mask predicts two places further on, which a row there verifies if it is not the answer's last
    most = host.limit[:, None] - 2 - (host.complete[:, None] + depth)
    masks = np.clip(most, 0, lookahead.masks) * wanted
    behind = masks[np.arange(len(masks)), host.drafts * running]  # the chain's last draft
    of_groups = masks.sum(1) + lookahead.lead * (masks > 0).sum(1)
    return masks, (host.drafts + 1) * running + of_groups, (host.drafts + behind) * (host.branches > 1)


def rows_on_rank(host: HostState, lookahead: Lookahead, ranks: int) -> Ints:
    """Return the rows of each sequence on the branch rank that has the most of them, ``[S]``, without prompts.

    Args:
        host, lookahead: as of `row_counts`.
        ranks: of the branch group.
    """
    _, common, of_path = row_counts(host, lookahead)
    return common + of_path * -(-(host.branches - 1) // ranks)


def prompt_rows(host: HostState, prefixes: SharedPrefixes) -> int:
    """Return how many rows of prompts run in the next forward."""
    waiting = (host.committed < 0) & (host.branches > 0)
    computed = prefixes.source == np.arange(len(waiting))
    return int((host.prompt - prefixes.length)[waiting].sum() + prefixes.length[waiting & computed].sum())


def layout(
    state: State,
    host: HostState,
    lookahead: Lookahead,
    prefixes: SharedPrefixes | None = None,
    rank: int = 0,
    ranks: int = 1,
) -> ForwardBatch:
    """Lay out this rank's share of the next forward: branch j > 0 runs on rank (j - 1) mod `ranks`, the rest on all.

    Args:
        state, host: the state and its host copy, of the same step.
        lookahead: of this step, the same on all ranks.
        prefixes: what prompts share; None if no prompt waits.
        rank, ranks: of the branch group.
    """
    masks, common_rows, path_rows = row_counts(host, lookahead)
    running = np.flatnonzero(host.branches > 0)
    waiting = (host.committed < 0) & (host.branches > 0)
    length = prefixes.length if prefixes else np.zeros_like(host.prompt)
    source = prefixes.source if prefixes else np.full_like(host.prompt, -1)
    slots = np.arange(len(host.prompt))
    prefix, suffix = np.flatnonzero(waiting & (source == slots)), np.flatnonzero(waiting & (host.prompt > length))
    of_group, group_depth = np.nonzero(masks)
    own = np.arange(rank, state.config.branches, ranks)  # paths
    local, of_path = np.nonzero((own[:, None] < host.branches - 1) & (path_rows > 0))
    pending = host.prompt + host.complete - 1  # [S] its place, counted from the prompt's first token

    # segments: prefixes of prompts, the rests of prompts, chains, groups of masks, the other branches
    sequence = np.concatenate([prefix, suffix, running, of_group, of_path])
    begin_of_group = pending[of_group] + group_depth + (0 if lookahead.blocks else 1)
    first = np.concatenate([0 * prefix, length[suffix], pending[running], begin_of_group, pending[of_path] + 1])
    rows = np.concatenate([
        length[prefix], (host.prompt - length)[suffix], host.drafts[running] + 1,
        masks[of_group, group_depth] + lookahead.lead, path_rows[of_path],
    ])  # fmt: skip
    start = rows.cumsum() - rows
    branch = np.concatenate([np.full(len(prefix) + len(suffix), -1), 0 * running, 0 * of_group, own[local] + 1])
    prompts, chains = len(prefix) + len(suffix), len(prefix) + len(suffix) + len(running)
    place = first.repeat(rows) + ragged_arange(rows)
    groups = chains + len(of_group)
    tokens_end, paths_begin, total = int(rows[:chains].sum()), int(rows[:groups].sum()), int(rows.sum())
    begin = int(rows[:prompts].sum())
    behind = np.where(np.arange(len(rows)) < chains, first + rows, first)  # cached tokens that a segment sees
    seen = place + 1
    seen[tokens_end:] = behind.repeat(rows)[tokens_end:]
    hi = np.zeros(total, np.int64)
    hi[tokens_end:] = ragged_arange(rows[chains:]) + 1
    of_row, heads, predicted = sequence.repeat(rows), np.arange(begin, total), place + 1
    written = np.arange(tokens_end)  # rows of tokens that stand in the canvas
    if lookahead.blocks:
        copies, masked = start[chains:groups], slice(tokens_end, paths_begin)
        hi[masked] = rows[chains:groups].repeat(rows[chains:groups])
        predicted[masked] -= 1
        heads = np.delete(heads, (copies[:, None] + np.arange(lookahead.lead)).ravel() - begin)
        written = np.append(written, copies)
    copies, counted = written[tokens_end:], masks[of_group, group_depth]

    common = len(heads) - (total - paths_begin)
    columns, width = path_columns(host, path_rows, of_path)
    of_path_row, local_row, number = (
        of_path.repeat(rows[groups:]),
        local.repeat(rows[groups:]),
        ragged_arange(rows[groups:]),
    )
    is_draft = number < host.drafts[of_path_row]
    of_chain = (of_path_row * state.config.max_branches + own[local_row] + 1) * state.config.max_drafts + number

    # to the device in one transfer
    cells = np.zeros(padded(max(total, 1)), np.int64)
    cells[written] = (of_row * state.canvas.shape[1] + state.origin + place - host.prompt[of_row])[written]
    positions = np.zeros(len(cells), np.int64)
    positions[:total] = place
    depths, group = masks.shape[1], max(int(masks.max(initial=0)), 1)
    head_sequence = of_row[heads]
    branching = np.flatnonzero(path_rows)
    drafts, behind_last = host.drafts[branching], (path_rows - host.drafts)[branching]
    on = together(
        state.canvas.device, cells=cells, positions=positions, head_rows=heads, head_sequence=head_sequence,
        predicted=(predicted - host.prompt[of_row])[heads], copies=copies,
        tokens=of_row[begin:tokens_end] * depths + ragged_arange(rows[prompts:chains]),
        masks=((of_group * depths + group_depth) * group).repeat(counted) + ragged_arange(counted),
        path_tokens=(branching * depths + 1).repeat(drafts) + ragged_arange(drafts),
        path_masks=((branching * depths + drafts) * group).repeat(behind_last) + ragged_arange(behind_last),
        slots=np.append(np.arange(common), common + local_row * width + columns),
        drafted=paths_begin + np.flatnonzero(is_draft), of_chain=of_chain[is_draft],
    )  # fmt: skip
    tokens = state.canvas.view(-1).index_select(0, on["cells"])
    copied = tokens.index_select(0, on["copies"]) if lookahead.blocks else None
    tokens[tokens_end:total] = state.vocabulary.mask_id
    if copied is not None:
        tokens.index_copy_(0, on["copies"], copied)
    if len(of_path):
        tokens.index_copy_(0, on["drafted"], state.chain[1].view(-1).index_select(0, on["of_chain"]))
    tokens[total:] = 0  # padding; a model without masks has no embedding of its mask id
    keys = state.noise_keys(on["head_sequence"], on["predicted"]) if state.sampled.any() else None
    none = np.full(len(slots), -1)
    prefill = Prefill(
        sequence[:prompts], first[:prompts], behind[:prompts], len(prefix), waiting, prefix_row=none, suffix_row=none
    )
    return ForwardBatch(
        sequence=sequence, branch=branch, start=start, rows=rows,
        shared=behind, first=first - host.prompt[sequence], hi=hi, depth=np.zeros(total, np.int64), tail=None,
        begin=host.complete - 1, stop=host.complete + host.drafts, prefill=prefill if prompts else None,
        tokens=tokens, positions=on["positions"], head_rows=on["head_rows"],
        head_slots=on["slots"], head_sequence=head_sequence, head_keys=keys, local_branches=1,
        columns=common + -(-state.config.branches // ranks) * width, where=on["tokens"], width=depths, of_commit=None,
        drafts=None,
        seen=seen, place=np.where(np.arange(total) < tokens_end, place, -1),
        causal=CausalRows(
            on["tokens"], on["masks"], depths, group, common_rows * ranks + path_rows * (host.branches - 1), common,
            on["path_tokens"], on["path_masks"],
        ),
    )  # fmt: skip


def path_columns(host: HostState, path_rows: Ints, of_path: Ints) -> tuple[Ints, int]:
    """Return each path row's column among the columns of its path, and how many columns one path has.

    A path has a column for each draft of all sequences, then for each mask behind them.

    Args:
        host: of the step.
        path_rows: ``[S]`` rows of each path of a sequence; 0: it has none.
        of_path: sequence of each path of this rank.
    """
    branching = path_rows > 0
    drafts, masks = host.drafts * branching, (path_rows - host.drafts) * branching
    number = ragged_arange(path_rows[of_path])
    sequence = of_path.repeat(path_rows[of_path])
    mask = drafts.sum() + (masks.cumsum() - masks)[sequence] + number - drafts[sequence]
    column = np.where(number < drafts[sequence], (drafts.cumsum() - drafts)[sequence] + number, mask)
    return column, int(path_rows.sum())


def unpack(state: State, batch: ForwardBatch, gathered: Tensor) -> Records:
    """Spread the records: ``[S, K, D]`` of chains, and of groups ``[S, K, D, n]``, with token -1 for no mask.

    Args:
        state, batch: of this step.
        gathered: ``[ranks, 1, columns, size]`` int32.
    """
    found, branches = batch.causal, state.config.max_branches
    assert found is not None
    records = gathered[0, 0, : found.common].T  # [size, columns]
    size, cells = len(records), state.slots * found.depths
    verified = records.new_zeros(size, branches, cells)
    verified[:, 0].index_copy_(1, found.tokens, records[:, : len(found.tokens)])
    drafted = records.new_full((size, branches, cells * found.group), -1)
    drafted[:, 0].index_copy_(1, found.masks, records[:, len(found.tokens) :])
    width, drafts = len(found.path_tokens) + len(found.path_masks), len(found.path_tokens)
    if width:  # path p lies at rank p mod ranks, p div ranks
        paths = gathered[:, 0, found.common :].view(len(gathered), -1, width, size).permute(3, 1, 0, 2)
        paths = paths.flatten(1, 2)[:, : branches - 1]  # [size, k, width]
        verified[:, 1:] = verified[:, :1]  # what the pending token predicts
        verified[:, 1:].index_copy_(2, found.path_tokens, paths[..., :drafts])
        drafted[:, 1:].index_copy_(2, found.path_masks, paths[..., drafts:])
    shape = size, branches, state.slots, found.depths
    groups = Records(drafted.view(*shape, found.group).transpose(1, 2))
    return Records(verified.view(shape).transpose(1, 2), groups)
