"""Which rows of which sequence and branch go through the model, on this rank.

The host knows a few integers of every sequence (`HostState`), so the ragged structure is worked out in numpy. What
depends on token values (ids, masked positions, edits) stays on the device and is indexed there.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lopa_dist.decode.config import DecodeConfig
from lopa_dist.decode.draft_rows import add_draft_rows, drafts_with_rows
from lopa_dist.decode.forward_batch import ROW_TILE, ForwardBatch
from lopa_dist.decode.prefill import SharedPrefixes, last_rows, note_rows, prefill_apart, prefill_segments
from lopa_dist.decode.state import HostState, Records, State
from lopa_dist.ragged import Ints, ragged_arange, to_device, together


def layout(
    state: State, host: HostState, rank: int = 0, ranks: int = 1, prefixes: SharedPrefixes | None = None
) -> ForwardBatch:
    """Lay out this rank's share of the next forward: branch j runs on rank j mod `ranks`.

    A prompt is prefilled by every rank, so that its K/V need not travel; with block-causal windows the same holds for
    complete blocks, whose K/V are the same in every branch.

    Args:
        state, host: the state and its host copy, of the same step.
        rank, ranks: of the branch group.
        prefixes: what prompts share; None where they share nothing.
    """
    config, device = state.config, state.canvas.device

    # segments
    sequence, branch, mine = window_segments(state, host, rank, ranks)
    begin, stop = row_span(state, host, prefixes)
    first, behind = begin[sequence], stop[sequence]
    prefill = prefill_segments(config, host, prefixes)
    if prefill:
        none = np.zeros_like(prefill.sequence)
        sequence, branch = np.append(prefill.sequence, sequence), np.append(none - 1, branch)
        first, behind = np.append(prefill.first, first), np.append(prefill.behind, behind)
        mine = np.append(none > 0, mine)
    prompt = host.prompt[sequence]
    rows = behind - first
    start = rows.cumsum() - rows  # in the order of positions
    shared = prompt + first  # nothing where the first row is the prompt's first
    tail = (prompt + behind, host.limit[sequence] - behind) if config.cache == "dual" else None

    # rows: what a segment adds to the packed row number r gives its position, its cell and its absolute position
    total = int(rows.sum())
    padded = -(-max(total, 1) // ROW_TILE) * ROW_TILE
    position = np.arange(total) + (first - start).repeat(rows)
    lo, hi = np.zeros(total, np.int64), own_columns(config, position, first, rows)
    cells, absolutes = np.zeros((2, padded + 1), np.int64)  # rows without a segment, and one more for edits of nothing
    cells[:total] = position + (sequence * state.canvas.shape[1] + state.origin).repeat(rows)
    absolutes[:total] = position + prompt.repeat(rows)

    # masked positions, one record per branch each; a head row's record goes to its `slot`
    masked = host.masked * (host.branches > 0)
    width = -(-int((host.end - host.complete).max(initial=1)) // config.block_size) * config.block_size
    amount = int(masked.sum())
    nowhere = state.slots * width  # a cell more, which nobody reads: for masks that the host counts and there are not
    where = torch.nonzero_static(state.window(width).masked.view(-1), size=amount, fill_value=nowhere)[:, 0]
    wanted = masked[sequence] * mine
    heads = wanted.cumsum() - wanted  # each segment's first
    entry = np.arange(wanted.sum()) + (masked.cumsum() - masked)[sequence].repeat(wanted) - heads.repeat(wanted)
    extra = drafts_with_rows(config, host)  # [S]
    columns = amount + int(extra.sum())
    slot = entry + (branch // ranks * columns).repeat(wanted)

    # the row that predicts the position `where` says: its own or, with the shift, the one before
    shift = int(state.vocabulary.shift)
    base = host.complete[sequence] + start - first - shift
    if prefill:
        note_rows(prefill, start, prefixes)
    bases = (base - sequence * width).repeat(wanted)
    if shift:
        ahead = np.flatnonzero(wanted * host.first_masked[sequence])  # the window's first position has no own row:
        boundary = np.maximum(base, start)  # any will do, for its record was kept,
        if prefill and prefill_apart(config):  # but for the prompt's last
            answers = prefill.waiting[sequence] & (prompt > 0)
            boundary = np.where(answers, last_rows(prefill, host, prefixes)[sequence], boundary)
        bases[heads[ahead]] = (boundary - sequence * width)[ahead]

    # on the device, in one transfer
    edited = sequence * config.max_branches + np.maximum(branch, 0)
    on = together(
        device,
        cells=cells,
        positions=absolutes,
        edited=edited,
        offset=start - first,
        entry=entry,
        base=bases,
        slot=slot,
    )
    tokens = state.canvas.view(-1).index_select(0, on["cells"])
    at, token = state.edits.flatten(1, 2).index_select(1, on["edited"])  # [G, E]
    tokens.scatter_(0, torch.where(at >= 0, at + on["offset"][:, None], padded).view(-1), token.view(-1))
    found = where[on["entry"]]
    head_rows = (on["base"] + found).clamp_(max=padded - 1)  # in range for `nowhere`, too
    head_sequence = sequence.repeat(wanted)
    keys = None
    if state.sampled.any():
        of = to_device(head_sequence, device)
        keys = state.noise_keys(of, state.complete[of] + found % width)
    stale = stale_boundary(state, host)
    batch = ForwardBatch(
        sequence=sequence, branch=branch, start=start, rows=rows, shared=shared, first=first, lo=lo, hi=hi, tail=tail,
        begin=begin, stop=stop, prefill=prefill, tokens=tokens[:padded], positions=on["positions"][:padded],
        head_rows=head_rows, head_slots=on["slot"], head_sequence=head_sequence, head_keys=keys,
        local_branches=-(-config.max_branches // ranks), columns=columns, where=where, width=width,
        stale=to_device(stale, device) if stale.any() else None, drafts=None,
    )  # fmt: skip
    return add_draft_rows(state, host, batch, extra, mine, ranks) if extra.any() else batch


def window_segments(state: State, host: HostState, rank: int, ranks: int) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """Return the sequences and branches of this rank's windows, and which of them it reports on.

    What must be cached and is the same in every branch is computed by every rank. A rank that has none of a sequence's
    branches then runs the anchor, on which another rank reports.
    """
    config = state.config
    owned = (host.branches - rank + ranks - 1) // ranks  # branches rank, rank + ranks, ...
    count = np.maximum(owned, 0)
    if ranks > 1 and config.cache != "none":
        prefill = (host.committed < 0) & (not prefill_apart(config))
        commits = (host.complete > host.committed) & (config.window_attention == "block_causal")
        count = np.maximum(count, (prefill | commits) & (host.branches > 0))
    sequence = np.repeat(np.arange(state.slots), count)
    mine = owned[sequence] > 0
    return sequence, np.where(mine, rank + ranks * ragged_arange(count), 0), mine


def row_span(state: State, host: HostState, prefixes: SharedPrefixes | None) -> tuple[Ints, Ints]:
    """Return which positions of the windows go through the model: those of ``[begin, stop)``, ``[S]`` each.

    A window begins at the first uncommitted token, at the boundary row before that or, where the prompt is no segment
    of its own, at the prompt's first token behind its shared prefix. It ends with the last appended block or, where the
    canvas is whole, with its last mask, unless a dual cache has the masks behind.
    """
    config = state.config
    if config.cache == "none":
        begin = -host.prompt
    else:
        anew = host.committed < 0
        if config.cache != "block":  # prefix and dual: whenever a block was completed, everything before it
            anew = host.committed < host.complete
        prompt = 0 if prefill_apart(config) else (prefixes.length if prefixes else 0) - host.prompt
        begin = np.where(anew, prompt, host.committed - fresh_boundary(state, host))
    if config.canvas == "growing":
        return begin, host.end
    return begin, np.where(anew, host.limit, host.end) if config.cache == "dual" else host.limit


def fresh_boundary(state: State, host: HostState) -> NDArray[np.bool_]:
    """Return ``[S]`` where the last committed row is recomputed because it predicts the first masked position.

    Only a row that sees the window can have changed since its commit: with block-causal windows, and at the end of a
    prompt that sees only itself, the record kept from the commit is the same, and no row is spent.
    """
    config = state.config
    if config.boundary != "fresh" or config.window_attention != "full" or not state.vocabulary.shift:
        return np.zeros(state.slots, bool)
    sees_window = (host.committed > 0) | (config.prompt_attention == "joint")
    return sees_window & (host.committed == host.complete) & (host.first_masked > 0)


def stale_boundary(state: State, host: HostState) -> NDArray[np.bool_]:
    """Return ``[S]`` where the first masked position takes the record kept from the commit."""
    config = state.config
    if config.cache == "none" or config.boundary == "fill" or not state.vocabulary.shift:
        return np.zeros(state.slots, bool)
    waiting = (host.committed >= 0) & (host.committed == host.complete) & (host.first_masked > 0)
    return waiting & ~fresh_boundary(state, host)


def own_columns(config: DecodeConfig, position: Ints, first: Ints, rows: Ints) -> Ints:
    """Return how many of its segment's columns each row sees, ``[R]``.

    Args:
        config: `window_attention` and `prompt_attention` are read.
        position: ``[R]``.
        first, rows: ``[G]`` position of each segment's first row, and its number of rows.
    """
    every = rows.repeat(rows)
    causal = config.window_attention == "block_causal"
    if not causal and first.min(initial=0) >= 0:
        return every
    of_its_block = (position // config.block_size + 1) * config.block_size
    in_window = of_its_block if causal else position + every  # or more: it ends with the segment
    in_prompt = {"self": np.zeros_like(position), "blocks": of_its_block, "joint": in_window}[config.prompt_attention]
    stop = np.where(position < 0, in_prompt, in_window)
    return np.minimum(stop - first.repeat(rows), every)


def unpack(state: State, batch: ForwardBatch, gathered: Tensor) -> Records:
    """Spread gathered records over ``[S, K, W]`` of `State.window`, and those of drafts over ``[S, C]``.

    A branch has a record of every position that the anchor leaves masked; those of branches that did not run are zeros.

    Args:
        state, batch: of this step.
        gathered: ``[ranks, local_branches, columns, 3]`` int32: token, and the bits of probability and confidence.
    """
    branches, masked = state.config.max_branches, len(batch.where)
    parts = gathered.permute(3, 1, 0, 2).flatten(1, 2)[:, :branches]  # branch j lies at rank j mod ranks, j div ranks
    cells = state.slots * batch.width
    dense = gathered.new_zeros(3, branches, cells + 1)  # one for records of no mask, see `layout`
    dense.index_copy_(2, batch.where, parts[:, :, :masked])
    packed = dense[..., :cells].view(3, branches, state.slots, batch.width).transpose(1, 2)
    if batch.stale is not None:
        first = packed[..., 0]
        torch.where(batch.stale[:, None], state.boundary.packed[..., None], first, out=first)
    if not state.config.drafts:
        return Records(packed)
    return Records(packed, unpack_drafts(state, batch, packed, parts[:, :, masked:]))


def unpack_drafts(state: State, batch: ForwardBatch, packed: Tensor, verified: Tensor) -> Records:
    """Return what the forward predicts for each draft in the context of the drafts before it, ``[S, C]``.

    For the first draft of a branch that is the branch's own record, as for drafts whose predicting row the forward did
    not compute, because no draft can change it. For the others it is the record of their verification row.

    Args:
        state, batch: of this step.
        packed: ``[3, S, K, W]`` the branches' records.
        verified: ``[3, K, n]`` records of the verification rows of all sequences.
    """
    m, slots, width = state.config.drafts, state.slots, packed.shape[-1]
    position = state.chain[0].view(slots, -1, m)  # [S, K, m]
    offset = (position - state.complete[:, None, None]).clamp(0, width - 1)  # in range where a branch has no draft, too
    drafts = packed.gather(3, offset.expand(3, -1, -1, -1))
    if batch.drafts is not None:
        dense = verified.new_zeros(3, verified.shape[1], slots * (m - 1))
        dense.index_copy_(2, batch.drafts.where, verified)
        rows = dense.view(3, -1, slots, m - 1).transpose(1, 2)  # [3, S, K, m - 1]
        has_row = position[..., 1:] - int(state.vocabulary.shift) >= batch.drafts.begin[:, None, None]
        drafts[..., 1:] = torch.where(has_row, rows, drafts[..., 1:])
    return Records(drafts.flatten(2))
