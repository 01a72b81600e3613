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

import numpy as np
from torch import Tensor

from lopa_dist.decode.config import DecodeConfig
from lopa_dist.decode.state import HostState, Records, State
from lopa_dist.ragged import Ints
from lopa_dist.rows import c_layout
from lopa_dist.rows.chain_layout import RowCounts, lay_out_plain, row_counts_plain
from lopa_dist.rows.forward_batch import ChainCells, ForwardBatch, Heads, Predictions, RowTable
from lopa_dist.rows.lookahead import Lookahead, lead_rows
from lopa_dist.rows.prefill import SharedPrefixes, prefill_segments
from lopa_dist.rows.row_maker import Kept, Structures
from lopa_dist.rows.share import Share
from lopa_dist.staging import together


def row_counts(host: HostState, lookahead: Lookahead) -> RowCounts:
    """Return how many rows each sequence has; the arguments are those of `row_counts_plain`.

    Masks are counted in C. Without them, numpy is faster.
    """
    library = c_layout.found()
    if isinstance(library, str) or not lookahead.masks:
        return row_counts_plain(host, lookahead)
    return c_layout.row_counts(library, host, lookahead)


def rows_on_rank(host: HostState, lookahead: Lookahead, share: Share) -> Ints:
    """Return the rows of each sequence on the branch rank that has the most of them, ``[S]``, without prompts.

    Args:
        host, lookahead: of the step.
        share: of any of the ranks.
    """
    counts = row_counts(host, lookahead)
    return counts.common + counts.path * share.most(host.branches)


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
        counts, prefill = row_counts(host, lookahead), prefill_segments(state.config, host, prefixes)
        library = c_layout.found()
        of_step = state, host, share, lookahead, prefill, counts
        made = lay_out_plain(*of_step) if isinstance(library, str) else c_layout.lay_out(library, *of_step)
        on = together(state.canvas.device, **made.indices)  # to the device in one transfer
        tokens = state.canvas.view(-1).index_select(0, on["canvas_cells"])
        if len(on["masks"]):
            tokens.index_fill_(0, on["masks"], state.vocabulary.mask_id)
        if len(on["drafts"]):
            drafted = state.chain_token.view(-1).index_select(0, on["chain_cells"])
            tokens.index_copy_(0, on["drafts"], drafted)
        keys = state.noise_keys(on["head_sequence"], on["predicted"]) if state.sampled.any() else None
        predictions = Predictions(on["heads"], keys)
        return ForwardBatch(
            table=RowTable(
                sequence=made.sequence, branch=made.branch, start=made.start, rows=made.rows, shared=made.shared,
                first=made.first, hi=made.hi, depth=np.zeros_like(made.hi), seen=made.seen, place=made.place,
            ),
            tokens=tokens, positions=on["positions"],
            heads=Heads(
                predict=lambda: predictions, slots=on["columns"], sequence=made.indices["head_sequence"],
                branches=1, columns=made.columns,
            ),
            share=share, computed=counts.common * share.ranks + counts.path * (host.branches - 1),
            prefill=prefill if prefill and len(prefill.sequence) else None,
            chains=ChainCells(on["cells"], on["path_cells"], made.depths, made.group),
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
        # as in `row_counts_plain`, of an answer that begins
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
