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
from lopa_dist.rows.forward_batch import CausalRows, ForwardBatch, Predictions
from lopa_dist.rows.prefill import Prefill, SharedPrefixes, prefill_segments


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


@dataclass
class Segments:
    """The segments of a forward on one rank: prompts, then chains, groups of masks, and the other branches (paths).

    [G] is a segment. Places are counted from the prompt's first token.
    """

    sequence: Ints  # [G]
    branch: Ints  # [G] -1 for prompts
    first: Ints  # [G] place of its first row
    rows: Ints  # [G]
    chains: int  # number of the first chain
    groups: int  # number of the first group
    paths: int  # number of the first path


def segments_on_rank(
    host: HostState, lookahead: Lookahead, prefill: Prefill | None, masks: Ints, path_rows: Ints, own: Ints
) -> Segments:
    """Return the segments of a forward.

    Args:
        host, lookahead: of the step.
        prefill: the segments of prompts.
        masks, path_rows: from `row_counts`.
        own: the branches beside the chain that run on this rank.
    """
    prompt = prefill.sequence if prefill else np.empty(0, np.int64)
    running = np.flatnonzero(host.branches > 0)
    of_group, depth = np.nonzero(masks)
    number, of_path = np.nonzero((own[:, None] < host.branches) & (path_rows > 0))
    pending = host.prompt + host.complete - 1  # [S] its place
    first = [pending[running], pending[of_group] + depth + (0 if lookahead.blocks else 1), pending[of_path] + 1]
    rows = [host.drafts[running] + 1, masks[of_group, depth] + lookahead.lead, path_rows[of_path]]
    if prefill:
        first.insert(0, prefill.first + host.prompt[prompt])
        rows.insert(0, prefill.behind - prefill.first)
    chains, groups = len(prompt), len(prompt) + len(running)
    paths = groups + len(of_group)
    return Segments(
        sequence=np.concatenate([prompt, running, of_group, of_path]),
        branch=np.concatenate([np.full(chains, -1), np.zeros(paths - chains, np.int64), own[number]]),
        first=np.concatenate(first), rows=np.concatenate(rows), chains=chains, groups=groups, paths=paths,
    )  # fmt: skip


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
    prefill = prefill_segments(state.config, host, prefixes)
    own = 1 + np.arange(rank, state.config.branches, ranks)
    segments = segments_on_rank(host, lookahead, prefill, masks, path_rows, own)
    sequence, branch, first, rows = segments.sequence, segments.branch, segments.first, segments.rows
    start = rows.cumsum() - rows
    place = first.repeat(rows) + ragged_arange(rows)
    # the first rows of chains, groups and paths
    chains_at, groups_at, paths_at = (int(rows[:n].sum()) for n in (segments.chains, segments.groups, segments.paths))
    total = int(rows.sum())
    shared = np.where(np.arange(len(rows)) < segments.groups, first + rows, first)  # cached tokens that a segment sees
    seen = place + 1
    seen[groups_at:] = shared.repeat(rows)[groups_at:]
    hi = np.zeros(total, np.int64)
    hi[groups_at:] = ragged_arange(rows[segments.groups :]) + 1
    of_row, heads, predicted = sequence.repeat(rows), np.arange(chains_at, total), place + 1
    written = np.arange(groups_at)  # rows of tokens that stand in the canvas
    if lookahead.blocks:
        groups = slice(segments.groups, segments.paths)
        copies, masked = start[groups], slice(groups_at, paths_at)
        hi[masked] = rows[groups].repeat(rows[groups])
        predicted[masked] -= 1
        heads = np.delete(heads, (copies[:, None] + np.arange(lookahead.lead)).ravel() - chains_at)
        written = np.append(written, copies)
    copies = written[groups_at:]

    # paths: a row is a draft, or one of the masks behind the drafts
    of_path, path_branch = of_row[paths_at:], branch.repeat(rows)[paths_at:]
    number = ragged_arange(rows[segments.paths :])
    is_draft = number < host.drafts[of_path]
    of_chain = (of_path * state.config.max_branches + path_branch) * state.config.max_drafts + number
    common = len(heads) - (total - paths_at)
    columns, width = path_columns(host, path_rows, of_path, number)

    # to the device in one transfer
    cells = np.zeros(padded(max(total, 1)), np.int64)
    cells[written] = (of_row * state.canvas.shape[1] + state.origin + place - host.prompt[of_row])[written]
    positions = np.zeros(len(cells), np.int64)
    positions[:total] = place
    depths, group = masks.shape[1], max(int(masks.max(initial=0)), 1)
    head_sequence = of_row[heads]
    of_group, group_depth = np.nonzero(masks)
    counted = masks[of_group, group_depth]
    branching = np.flatnonzero(path_rows)
    drafts, behind_last = host.drafts[branching], (path_rows - host.drafts)[branching]
    on = together(
        state.canvas.device, cells=cells, positions=positions, head_rows=heads, head_sequence=head_sequence,
        predicted=(predicted - host.prompt[of_row])[heads], copies=copies,
        tokens=of_row[chains_at:groups_at] * depths + ragged_arange(rows[segments.chains : segments.groups]),
        masks=((of_group * depths + group_depth) * group).repeat(counted) + ragged_arange(counted),
        path_tokens=(branching * depths + 1).repeat(drafts) + ragged_arange(drafts),
        path_masks=((branching * depths + drafts) * group).repeat(behind_last) + ragged_arange(behind_last),
        slots=np.append(np.arange(common), common + (path_branch - 1) // ranks * width + columns),
        drafted=paths_at + np.flatnonzero(is_draft), of_chain=of_chain[is_draft],
    )  # fmt: skip
    tokens = state.canvas.view(-1).index_select(0, on["cells"])
    copied = tokens.index_select(0, on["copies"]) if lookahead.blocks else None
    tokens[groups_at:total] = state.vocabulary.mask_id
    if copied is not None:
        tokens.index_copy_(0, on["copies"], copied)
    if len(of_path):
        tokens.index_copy_(0, on["drafted"], state.chain_token.view(-1).index_select(0, on["of_chain"]))
    tokens[total:] = 0  # padding; a model without masks has no embedding of its mask id
    keys = state.noise_keys(on["head_sequence"], on["predicted"]) if state.sampled.any() else None
    predictions = Predictions(on["head_rows"], keys)
    return ForwardBatch(
        sequence=sequence, branch=branch, start=start, rows=rows,
        shared=shared, first=first - host.prompt[sequence], hi=hi, depth=np.zeros(total, np.int64), tail=None,
        begin=host.complete - 1, stop=host.complete + host.drafts, prefill=prefill if segments.chains else None,
        tokens=tokens, positions=on["positions"], predict=lambda: predictions,
        head_slots=on["slots"], head_sequence=head_sequence, local_branches=1,
        columns=common + -(-state.config.branches // ranks) * width, width=depths, of_commit=None,
        drafts=None,
        seen=seen, place=np.where(np.arange(total) < groups_at, place, -1),
        causal=CausalRows(
            on["tokens"], on["masks"], depths, group, common_rows * ranks + path_rows * (host.branches - 1), common,
            on["path_tokens"], on["path_masks"],
        ),
    )  # fmt: skip


def path_columns(host: HostState, path_rows: Ints, sequence: Ints, number: Ints) -> tuple[Ints, int]:
    """Return each path row's column among the columns of its path, and how many columns one path has.

    A path has a column for each draft of all sequences, then for each mask behind them.

    Args:
        host: of the step.
        path_rows: ``[S]`` rows of each path of a sequence; 0: it has none.
        sequence, number: of each row of the paths on this rank: its sequence, and its number in the path.
    """
    branching = path_rows > 0
    drafts, masks = host.drafts * branching, (path_rows - host.drafts) * branching
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
