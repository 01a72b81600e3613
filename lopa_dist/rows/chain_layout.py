"""The layout of a causal model's forward (`rows.causal_rows`): its segments, its rows, and where predictions go."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lopa_dist.decode.config import DecodeConfig
from lopa_dist.decode.state import HostState, State
from lopa_dist.ragged import Ints, begins, padded, ragged_arange
from lopa_dist.rows.lookahead import Lookahead
from lopa_dist.rows.prefill import Prefill
from lopa_dist.rows.share import Share


class RowCounts(NamedTuple):
    """How many rows each sequence has, not counting those of prompts."""

    masks: Ints  # [S, D] masks after each depth of the chain whose predictions count
    common: Ints  # [S] rows of the chain and its groups, which all branch ranks run
    path: Ints  # [S] rows of each branch beside the chain
    group: int  # the most masks of a group, but at least 1
    groups: int  # groups of all sequences
    rows: int  # the sum of `common`
    width: int  # the sum of `path`


def row_counts_plain(host: HostState, lookahead: Lookahead) -> RowCounts:
    """Return how many rows each sequence has, by numpy: what C does in a few microseconds (`rows.c_layout`).

    Masks are left out if they would predict the answer's last position or a later one, and after an end-of-text.

    Args:
        host: of the step.
        lookahead: which masks are wanted.
    """
    running = host.branches > 0
    drafts = host.drafts * running
    depth = np.arange(int(drafts.max(initial=0)) + 1)  # [D]
    if not lookahead.masks:
        common, path = running + drafts, drafts * (host.branches > 1)
        masks = np.zeros((len(drafts), len(depth)), np.int64)
        return RowCounts(masks, common, path, 1, 0, int(common.sum()), int(path.sum()))
    last = depth == drafts[:, None]  # [S, D]
    if lookahead.has_group is not None:
        marked = lookahead.has_group[:, : len(depth)]
        wanted = np.zeros_like(last)
        wanted[:, : marked.shape[1]] = marked
    else:
        wanted = last | np.isin(depth, lookahead.depths)
    wanted = wanted & (depth <= (drafts - host.expects_eos)[:, None]) & running[:, None]
    # After the token at depth d, which has the position complete - 1 + d, mask i predicts position complete + d + i.
    # Drafts go up to position limit - 2: the row there predicts the answer's last token, at limit - 1, without a draft.
    most = host.limit[:, None] - 2 - (host.complete[:, None] + depth)
    masks = np.minimum(np.maximum(most, 0), lookahead.masks) * wanted
    groups = (masks > 0).sum(1)
    common = running + drafts + masks.sum(1) + lookahead.lead * groups  # the pending token, its drafts, and groups
    path = (drafts + masks[np.arange(len(masks)), drafts]) * (host.branches > 1)
    group = max(int(masks.max(initial=0)), 1)
    return RowCounts(masks, common, path, group, int(groups.sum()), int(common.sum()), int(path.sum()))


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
        counts: of the step.
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


class Layout(NamedTuple):
    """The rows of a forward on one rank; [G] is a segment and [R] a row, as in `RowTable`."""

    sequence: Ints  # [G] as in `RowTable`, like the eight fields after it
    branch: Ints
    start: Ints
    rows: Ints
    shared: Ints
    first: Ints
    hi: Ints
    seen: Ints
    place: Ints
    columns: int  # of the records
    depths: int  # as in `ChainCells`
    group: int
    # what the device needs, with R' rows, padding included, H rows that predict (those of chains, of groups, then of
    # paths), and all that `ChainCells` has. `canvas_cells`, `positions`: [R']; `heads`, `columns`, `head_sequence`,
    # `predicted`: [H] the row, its record, its sequence, and the position that it predicts; `cells`, `path_cells`;
    # `masks`: rows that hold masks; `drafts`, `chain_cells`: rows that hold paths' drafts, and where these stand in
    # `State.chain_token`
    indices: dict[str, Ints]


def lay_out_plain(
    state: State, host: HostState, share: Share, lookahead: Lookahead, prefill: Prefill | None, counts: RowCounts
) -> Layout:
    """Return the layout of a forward, by numpy: what C does in a few microseconds (`rows.c_layout`).

    Args:
        state, host, share, lookahead: of the step.
        prefill: the segments of prompts.
        counts: of the step.
    """
    config = state.config
    own = own_paths(config, share)
    segments = segments_on_rank(host, lookahead, prefill, counts, own)
    rows = rows_of(host, lookahead, segments)
    in_group, in_path = rows.kind == GROUP, rows.kind == PATH
    is_draft = in_path & (rows.mask == 0)
    predicting_mask = rows.mask > 0
    is_mask = predicting_mask | in_group & (rows.mask == 0)  # -1 is the copy

    heads = np.flatnonzero((rows.kind > PROMPT) & (~in_group | predicting_mask))
    common, width = int((~in_path[heads]).sum()), counts.width
    columns = np.arange(len(heads))
    if width:
        columns[common:] = common + path_columns(rows, counts.path, width, heads[common:], share)
    depths, group = counts.masks.shape[1], counts.group

    def cell(sequence: Ints, depth: Ints, mask: Ints) -> Ints:  # in `ChainCells`
        return (sequence * depths + depth) * (1 + group) + mask

    branching = np.arange(len(counts.path)).repeat(counts.path)
    path_cells = cell(branching, *depth_and_mask(host.drafts[branching], ragged_arange(counts.path)))
    chain_cells = (rows.sequence * config.max_branches + rows.branch) * config.max_drafts + rows.number

    pending = host.prompt + host.complete - 1  # [S] its place, from the prompt's first token on
    of_row, of_segment = pending[rows.sequence], pending[segments.sequence]
    total, place = len(of_row), rows.place + of_row
    position = place - host.prompt[rows.sequence]
    canvas_cells, positions = np.zeros((2, padded(max(total, 1))), np.int64)
    canvas_cells[:total] = rows.sequence * state.canvas.shape[1] + state.origin + position
    canvas_cells[total:] = canvas_cells[0]  # a token of a text, which every model can embed
    positions[:total] = place
    indices = {
        "canvas_cells": canvas_cells, "positions": positions, "heads": heads, "columns": columns,
        "head_sequence": rows.sequence[heads], "predicted": (position + 1 - in_group * lookahead.blocks)[heads],
        "cells": cell(rows.sequence, rows.depth, rows.mask)[heads[:common]], "path_cells": path_cells,
        "masks": np.flatnonzero(is_mask), "drafts": np.flatnonzero(is_draft), "chain_cells": chain_cells[is_draft],
    }  # fmt: skip
    return Layout(
        segments.sequence, segments.branch, begins(segments.rows), segments.rows,
        segments.first + of_segment + np.where(segments.kind >= GROUP, 0, segments.rows),
        segments.first + of_segment - host.prompt[segments.sequence],
        rows.hi, rows.seen + of_row, np.where(rows.kind >= GROUP, -1, place),
        common + share.most(config.max_branches) * width, depths, group, indices,
    )  # fmt: skip


def own_paths(config: DecodeConfig, share: Share) -> Ints:
    """Return the branches beside the chain that run on this rank; maybe some beyond the last, which no sequence has."""
    return share.mine(np.arange(share.most(config.max_branches)))


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
