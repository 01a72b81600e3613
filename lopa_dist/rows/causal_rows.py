"""Which rows of a causal model run, and what they see.

For a sequence whose pending token is the c-th, with m drafts and groups of n masks:

    row         pending   d_1 ... d_m       group after d_i (i = 0: pending)
    place       c         c+1 ... c+m       c+i+1 ... c+i+n
    predicts    c+1       c+2 ... c+m+1     c+i+2 ... c+i+n+1
    sees        0 ... c   0 ... its own     0 ... c+i, and its group up to itself
    depth       0         1 ... m           i
    mask        0         0                 1 ... n

Depth and mask say which cell of `ChainCells` a row's prediction belongs to. Where masks see one another
(`Lookahead.blocks`, linear self-speculation of arXiv 2607.05722), a group is a block:

    row         copy of d_i   mask for the next pending token   n masks
    place       c+i           c+i+1                             c+i+2 ... c+i+n+1
    predicts    nothing       nothing: d_i's own row does       c+i+2 ... c+i+n+1, each its own place
    sees        all: 0 ... c+i-1, and all of the block
    mask        -1            0                                 1 ... n

The copy is there because d_i's own row, which verifies, does not see the masks.

K/V of tokens are written to their place in the pool before attention. Accepting a token only moves a frontier; the
K/V of a rejected one are overwritten by the next forward. K/V of masks lie in scratch. A prompt's rows run in the
forward of its sequence's first step, before all others; its last token is the first pending one.

A branch beside the chain (`rules.paths`) is one more segment after the pending token: its drafts and a group of n
masks after them, all in scratch. Branch ranks share these branches; all other rows run on every rank, so that each has
all K/V. If such a branch wins, `engine.commit` moves the K/V of its accepted tokens into the pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lopa_dist.decode.config import DecodeConfig
from lopa_dist.decode.state import HostState, Records, State
from lopa_dist.ragged import Ints, begins, padded, ragged_arange
from lopa_dist.rows import c_shape
from lopa_dist.rows.forward_batch import ChainCells, ForwardBatch, Heads, Predictions, RowTable
from lopa_dist.rows.lookahead import Lookahead, lead_rows
from lopa_dist.rows.prefill import Prefill, SharedPrefixes, prefill_segments
from lopa_dist.rows.row_maker import Kept, Structures, keep
from lopa_dist.rows.share import Share
from lopa_dist.staging import together


class RowCounts(NamedTuple):
    """How many rows each sequence has, not counting those of prompts."""

    masks: Ints  # [S, D] masks after each depth of the chain whose predictions count
    common: Ints  # [S] rows of the chain and its groups, which all branch ranks run
    path: Ints  # [S] rows of each branch beside the chain


def row_counts(host: HostState, lookahead: Lookahead) -> RowCounts:
    """Return how many rows each sequence has.

    Masks are left out if they would predict the answer's last position or a later one, and after an end-of-text.

    Args:
        host: of the step.
        lookahead: which masks are wanted.
    """
    running = host.branches > 0
    drafts = host.drafts * running
    depth = np.arange(int(drafts.max(initial=0)) + 1)  # [D]
    if not lookahead.masks:
        masks = np.zeros((len(drafts), len(depth)), np.int64)
        return RowCounts(masks=masks, common=running + drafts, path=drafts * (host.branches > 1))
    last = depth == drafts[:, None]  # [S, D]
    if lookahead.has_group is not None:
        wanted = lookahead.has_group[:, : len(depth)] & (depth <= drafts[:, None])
    else:
        wanted = last | np.isin(depth, lookahead.depths) if lookahead.depths else last
    wanted &= (depth <= (drafts - host.expects_eos)[:, None]) & running[:, None]
    # After the token at depth d, which has the position complete - 1 + d, mask i predicts position complete + d + i.
    # Drafts go up to position limit - 2: the row there predicts the answer's last token, at limit - 1, without a draft.
    most = host.limit[:, None] - 2 - (host.complete[:, None] + depth)
    masks = np.minimum(np.maximum(most, 0), lookahead.masks) * wanted
    of_groups = masks.sum(1) + lookahead.lead * (masks > 0).sum(1)
    after_last = masks[np.arange(len(masks)), drafts]
    return RowCounts(
        masks=masks,
        common=running + drafts + of_groups,  # the pending token, its drafts, and groups
        path=(drafts + after_last) * (host.branches > 1),
    )


def rows_on_rank(host: HostState, lookahead: Lookahead, share: Share) -> Ints:
    """Return the rows of each sequence on the branch rank that has the most of them, ``[S]``, without prompts.

    Args:
        host, lookahead: as in `row_counts`.
        share: of any of the ranks.
    """
    counts = row_counts(host, lookahead)
    return counts.common + counts.path * share.most(host.branches)


PROMPT, CHAIN, GROUP, PATH = range(4)
"""Kinds of segments, in their order. Rows of the last two have their K/V in scratch."""


class ChainSegments(NamedTuple):
    """The segments of a forward on one rank; [G] is a segment. Places are counted from its sequence's pending token."""

    kind: Ints  # [G]
    sequence: Ints  # [G]
    branch: Ints  # [G] -1 for prompts
    first: Ints  # [G] place of its first row
    rows: Ints  # [G]
    depth: Ints  # [G] drafts before a group of masks


def segments_on_rank(
    host: HostState, lookahead: Lookahead, prefill: Prefill | None, counts: RowCounts, own: Ints
) -> ChainSegments:
    """Return the segments of a forward.

    Args:
        host, lookahead: of the step.
        prefill: the segments of prompts.
        counts: from `row_counts`.
        own: the branches beside the chain that run on this rank.
    """
    chain = np.flatnonzero(host.branches > 0)
    group, depth = np.nonzero(counts.masks)
    number, path = np.nonzero((own[:, None] < host.branches) & (counts.path > 0))
    nothing = chain[:0]
    by_kind = [  # the sequence of each segment, the place of its first row, and its rows
        (nothing, nothing, nothing),  # prompts, where some run
        (chain, np.zeros_like(chain), host.drafts[chain] + 1),
        (group, depth + (not lookahead.blocks), counts.masks[group, depth] + lookahead.lead),
        (path, np.ones_like(path), counts.path[path]),
    ]
    if prefill:
        by_kind[PROMPT] = prompt_segments(host, prefill)
    sequence, first, rows = (np.concatenate(parts) for parts in zip(*by_kind, strict=True))
    kind = np.arange(4).repeat([len(part) for part, *_ in by_kind])
    branch, depths = np.where(kind == PROMPT, -1, 0), np.zeros_like(kind)
    branch[kind == PATH], depths[kind == GROUP] = own[number], depth
    return ChainSegments(kind, sequence, branch, first, rows, depths)


def prompt_segments(host: HostState, prefill: Prefill) -> tuple[Ints, Ints, Ints]:
    """Return the sequence of each prompt's segment, the place of its first row, and its number of rows."""
    return prefill.sequence, prefill.first - (host.complete - 1)[prefill.sequence], prefill.stop - prefill.first


class Rows(NamedTuple):
    """The rows of a forward on one rank; [R] is a row. Places are counted as those of `ChainSegments`."""

    kind: Ints  # [R] of its segment, like the two fields after it
    sequence: Ints  # [R]
    branch: Ints  # [R]
    number: Ints  # [R] in its segment
    place: Ints  # [R]
    seen: Ints  # [R] place after the cached tokens that it sees
    hi: Ints  # [R] rows of its segment that it sees, of those in scratch
    depth: Ints  # [R] of the token from which it predicts: 0 the pending one, i the i-th draft
    mask: Ints  # [R] number of a mask after that token, from 1; 0: that token. In a group, 0 and -1 predict nothing


def rows_of(host: HostState, lookahead: Lookahead, segments: ChainSegments) -> Rows:
    """Return the rows of a forward; `host`, `lookahead` and `segments` are those of the step."""
    kind, sequence, branch, first, rows, group_depth = (x.repeat(segments.rows) for x in segments)
    in_group, in_path, in_scratch = kind == GROUP, kind == PATH, kind >= GROUP
    number = ragged_arange(segments.rows)
    path_depth, path_mask = depth_and_mask(host.drafts[sequence], number)
    return Rows(
        kind=kind, sequence=sequence, branch=branch, number=number, place=first + number,
        seen=np.where(in_scratch, first, first + number + 1),
        hi=np.where(in_group & lookahead.blocks, rows, number + 1) * in_scratch,
        depth=np.where(in_group, group_depth, np.where(in_path, path_depth, number)),
        mask=np.where(in_group, number + 1 - lookahead.lead, in_path * path_mask),
    )  # fmt: skip


def depth_and_mask(drafts: Ints, number: Ints) -> tuple[Ints, Ints]:
    """Return `Rows.depth` and `Rows.mask` of rows of paths: drafts, and masks after the last one.

    Args:
        drafts: ``[n]`` of each row's path.
        number: ``[n]`` of the row in its path.
    """
    return np.minimum(number + 1, drafts), np.maximum(number + 1 - drafts, 0)


class Shape(NamedTuple):
    """The layout of a forward on one rank, apart from the places of the pending tokens; many steps share one."""

    segments: ChainSegments
    start: Ints  # [G] first row of each segment
    shared: Ints  # [G] place after the cached tokens that all its rows see, its own in the pool included
    sequence: Ints  # [R] as in `Rows`, like the three fields after it
    place: Ints  # [R]
    seen: Ints  # [R]
    hi: Ints  # [R]
    in_scratch: NDArray[np.bool_]  # [R] whether a row's K/V go into scratch
    ahead: Ints  # [H] how far after its row a prediction belongs: 1, or 0 in blocks
    columns: int  # of the records
    depths: int  # as in `ChainCells`
    group: int
    indices: dict[str, Ints]  # what the device needs; `heads` are the rows that predict: of chains, groups, then paths
    on_device: dict[str, Tensor]  # the same, on the device


MOST_STRUCTURES, MOST_KEPT_ROWS = 64, 512  # cached shapes, and rows of each: larger ones hardly ever repeat


def shape_of(
    config: DecodeConfig,
    host: HostState,
    share: Share,
    lookahead: Lookahead,
    prefill: Prefill | None,
    counts: RowCounts,
) -> Shape:
    """Return the shape of a forward; the arguments are those of the step. Forwards without paths are laid out in C."""
    library = c_shape.found()
    if isinstance(library, str) or counts.path.any():
        return shape_of_plain(config, host, share, lookahead, prefill, counts)
    group = max(int(counts.masks.max(initial=0)), 1) if lookahead.masks else 1
    prompts = np.zeros((3, 0), np.int64) if prefill is None else np.array(prompt_segments(host, prefill))
    of_segments, of_rows, of_heads, masks = c_shape.chain_shape(
        library, host, lookahead, prompts, int(counts.common.sum()), counts.masks, group
    )
    *segments, start, shared = of_segments
    sequence, place, seen, hi, in_scratch = of_rows
    heads, head_sequence, cells, ahead = of_heads
    nothing = masks[:0]
    indices = {
        "heads": heads, "columns": np.arange(len(heads)), "head_sequence": head_sequence, "cells": cells,
        "path_cells": nothing, "masks": masks, "drafts": nothing, "chain_cells": nothing,
    }  # fmt: skip
    return Shape(
        ChainSegments(*segments), start, shared, sequence, place, seen, hi, in_scratch > 0, ahead, len(heads),
        counts.masks.shape[1], group, indices, {},
    )  # fmt: skip


def shape_of_plain(
    config: DecodeConfig,
    host: HostState,
    share: Share,
    lookahead: Lookahead,
    prefill: Prefill | None,
    counts: RowCounts,
) -> Shape:
    """Return what `shape_of` does, by numpy."""
    slots = np.arange(share.most(config.max_branches))
    own = share.mine(slots)  # maybe some beyond the last, which no sequence has
    segments = segments_on_rank(host, lookahead, prefill, counts, own)
    rows = rows_of(host, lookahead, segments)
    in_group, in_path = rows.kind == GROUP, rows.kind == PATH
    is_draft = in_path & (rows.mask == 0)
    predicting_mask = rows.mask > 0
    is_mask = predicting_mask | in_group & (rows.mask == 0)  # -1 is the copy

    heads = np.flatnonzero((rows.kind > PROMPT) & (~in_group | predicting_mask))
    common, width = int((~in_path[heads]).sum()), int(counts.path.sum())
    columns = np.arange(len(heads))
    if width:
        columns[common:] = common + path_columns(rows, counts.path, width, heads[common:], share)
    depths, group = counts.masks.shape[1], max(int(counts.masks.max(initial=0)), 1)

    def cell(sequence: Ints, depth: Ints, mask: Ints) -> Ints:  # in `ChainCells`
        return (sequence * depths + depth) * (1 + group) + mask

    branching = np.arange(len(counts.path)).repeat(counts.path)
    path_cells = cell(branching, *depth_and_mask(host.drafts[branching], ragged_arange(counts.path)))
    chain_cells = (rows.sequence * config.max_branches + rows.branch) * config.max_drafts + rows.number
    indices = {
        "heads": heads, "columns": columns, "head_sequence": rows.sequence[heads],
        "cells": cell(rows.sequence, rows.depth, rows.mask)[heads[:common]], "path_cells": path_cells,
        "masks": np.flatnonzero(is_mask), "drafts": np.flatnonzero(is_draft), "chain_cells": chain_cells[is_draft],
    }  # fmt: skip
    return Shape(
        segments, begins(segments.rows), segments.first + np.where(segments.kind >= GROUP, 0, segments.rows),
        rows.sequence, rows.place, rows.seen, rows.hi, rows.kind >= GROUP, (1 - in_group * lookahead.blocks)[heads],
        common + share.most(config.max_branches) * width, depths, group, indices, {},
    )  # fmt: skip


@dataclass(frozen=True)
class CausalRows:
    """The rows of causal models (`RowMaker`). The anchor is the chain, whose K/V every rank computes."""

    everywhere = 1
    in_place = True

    def layout(
        self,
        state: State,
        host: HostState,
        share: Share,
        prefixes: SharedPrefixes | None,
        lookahead: Lookahead,
        structures: Structures,
    ) -> ForwardBatch:
        """Lay out this rank's share of the next forward: all but some of the branches beside the chain."""
        config = state.config
        counts, prefill = row_counts(host, lookahead), prefill_segments(config, host, prefixes)
        made = lookahead.blocks, *(x.tobytes() for x in (host.branches, host.drafts, counts.masks))
        shape = None if prefill else structures.get(made)
        new = shape is None
        if shape is None:
            shape = shape_of(config, host, share, lookahead, prefill, counts)
        _, sequence, branch, first, count, _ = shape.segments

        # to the device in one transfer
        pending = host.prompt + host.complete - 1  # [S] its place, from the prompt's first token on
        of_row = pending[shape.sequence]
        total, place = len(of_row), shape.place + of_row
        position = place - host.prompt[shape.sequence]
        canvas_cells, positions = np.zeros((2, padded(max(total, 1))), np.int64)
        canvas_cells[:total] = shape.sequence * state.canvas.shape[1] + state.origin + position
        positions[:total] = place
        on = together(
            state.canvas.device, canvas_cells=canvas_cells, positions=positions,
            predicted=position[shape.indices["heads"]] + shape.ahead, **(shape.indices if new else {}),
        )  # fmt: skip
        if new:
            shape.on_device.update({name: on[name] for name in shape.indices})
            if not prefill and total <= MOST_KEPT_ROWS:
                keep(structures, made, shape, MOST_STRUCTURES)
        of_shape = shape.on_device
        tokens = state.canvas.view(-1).index_select(0, on["canvas_cells"])
        if len(of_shape["masks"]):
            tokens.index_fill_(0, of_shape["masks"], state.vocabulary.mask_id)
        if len(of_shape["drafts"]):
            drafted = state.chain_token.view(-1).index_select(0, of_shape["chain_cells"])
            tokens.index_copy_(0, of_shape["drafts"], drafted)
        tokens[total:] = 0  # padding; a model without masks has no embedding of its mask id
        keys = state.noise_keys(of_shape["head_sequence"], on["predicted"]) if state.sampled.any() else None
        predictions = Predictions(of_shape["heads"], keys)
        of_segment = pending[sequence]
        return ForwardBatch(
            table=RowTable(
                sequence=sequence, branch=branch, start=shape.start, rows=count,
                shared=shape.shared + of_segment, first=first + of_segment - host.prompt[sequence], hi=shape.hi,
                depth=np.zeros(total, np.int64), seen=shape.seen + of_row,
                place=np.where(shape.in_scratch, -1, place),
            ),
            tokens=tokens, positions=on["positions"],
            heads=Heads(
                predict=lambda: predictions, slots=of_shape["columns"], sequence=shape.indices["head_sequence"],
                branches=1, columns=shape.columns,
            ),
            share=share, computed=counts.common * share.ranks + counts.path * (host.branches - 1),
            prefill=prefill if (branch < 0).any() else None,
            chains=ChainCells(of_shape["cells"], of_shape["path_cells"], shape.depths, shape.group),
        )  # fmt: skip

    def unpack(self, state: State, batch: ForwardBatch, gathered: Tensor) -> Records:
        """Return the records of chains, ``[S, K, D]``, and of groups, ``[S, K, D, n]``, with token -1 for no mask."""
        rows, branches, size = batch.chains, state.config.max_branches, gathered.shape[-1]
        assert rows is not None
        common, width = len(rows.cells), len(rows.path_cells)
        dense = gathered.new_full((size, branches, state.slots * rows.depths * (1 + rows.group)), -1)
        dense[:, 0].index_copy_(1, rows.cells, gathered[0, 0, :common].T)
        shaped = dense.view(size, branches, state.slots, rows.depths, 1 + rows.group)
        if width:
            paths = batch.share.by_branch(gathered[:, 0, common:].unflatten(1, (-1, width)), branches)
            shaped[:, 1:, :, 0, 0] = shaped[:, :1, :, 0, 0]  # what the pending token predicts
            dense[:, 1:].index_copy_(2, rows.path_cells, paths.permute(2, 0, 1))
        packed = shaped.transpose(1, 2)
        return Records(packed[..., 0], Records(packed[..., 1:]))

    def kept(self, config: DecodeConfig, batch: ForwardBatch, before: HostState, after: HostState) -> Kept | None:
        """Return the rows of accepted drafts where another branch than the chain won; the chain's K/V are in place."""
        # the last token that was written is the next pending one, whose K/V are not computed yet
        won = (after.winner > 0) & (before.branches > 1) & (after.done == 0)
        if not won.any():
            return None
        count = np.where(won, after.complete - before.complete - 1, 0)
        return Kept(before.prompt + before.complete, count, np.zeros_like(won))

    def in_step(self, state: State, host: HostState, lookahead: Lookahead, share: Share) -> Ints:
        """See `RowMaker`."""
        return rows_on_rank(host, lookahead, share)

    def usual(self, config: DecodeConfig) -> int:
        """See `RowMaker`: the pending token, its drafts, and masks after them; drafts and masks of each path."""
        return 1 + config.max_drafts * (1 + config.drafts_masks) * config.max_branches

    def of_branch(self, config: DecodeConfig, window: int) -> int:
        """See `RowMaker`: no rows follow the window."""
        return window

    def apart(self, config: DecodeConfig, branches: int) -> int:
        """See `RowMaker`: the chain, groups of masks after its tokens, and paths.

        With ``drafts=auto`` there may be a group after every token, otherwise after two
        (`LookaheadPolicy.lookahead`).
        """
        answer = config.max_new_tokens
        drafts = min(config.max_drafts, max(answer - 1, 0))
        # as in `row_counts`, of an answer that begins
        masks = np.clip(answer - 2 - np.arange(drafts + 1), 0, config.max_drafts) * config.drafts_masks
        groups = masks[: None if config.drafts == "auto" else 2]
        lead = lead_rows(blocks=True)  # where masks draft in blocks
        of_groups = int((groups + lead * (groups > 0)).sum())
        return 1 + drafts + of_groups + (branches - 1) * (drafts + int(masks[0]))

    def predictions(self, config: DecodeConfig, branches: int, window: int) -> int:
        """See `RowMaker`; with ``drafts=auto``, enough for every choice.

        Otherwise, a choice could seem slow only because its graph is captured while it is tried.
        """
        return self.apart(config, branches) if config.drafts == "auto" else self.usual(config)

    def groups(self, config: DecodeConfig) -> int:
        """See `RowMaker`: one group of masks for each depth of the chain."""
        return config.max_drafts + 1


def path_columns(rows: Rows, path_rows: Ints, width: int, of_paths: Ints, share: Share) -> Ints:
    """Return where the predictions of paths go, after those of chains and groups.

    First come the first paths of all sequences on this rank, then their second paths, and so on. For example, if the
    paths of two sequences have 5 and 3 rows, the columns 0 to 4 and 5 to 7 are those of their first paths, 8 to 12 and
    13 to 15 those of their second ones. Paths that do not run have columns, too.

    Args:
        rows: of the forward.
        path_rows: ``[S]`` rows of each path of a sequence.
        width: their sum.
        of_paths: the rows that belong to paths.
        share: of this rank.
    """
    path = share.slot(rows.branch[of_paths])
    begin = begins(path_rows)[rows.sequence[of_paths]]
    return path * width + begin + rows.number[of_paths]
