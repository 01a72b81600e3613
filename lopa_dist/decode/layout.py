"""Which rows of which sequence x branch go through the model, on this rank.

The host knows a few integers per sequence (`Lengths`), so the ragged structure is worked out in numpy; what depends on
token values (ids, masked positions, edits) stays on the device and is indexed there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lopa_dist.decode.config import DecodeConfig
from lopa_dist.decode.state import Lengths, Records, State
from lopa_dist.ragged import Ints, send, within

ROW_TILE = 16  # rows are padded to a multiple of this: matrix kernels then give a row the same bits in any batch


@dataclass
class Lead:
    """The first tokens of each sequence's prompt, where their K/V may serve other sequences too; [S] each."""

    tokens: Ints  # how many; 0 for none
    source: Ints  # of prompts not cached yet: the sequence that computes the lead in this forward; -1: it is cached
    last: Ints  # where the hidden state of the lead's last row is kept: negative, counted from behind


@dataclass
class Prompts:
    """The prompts among a forward's segments."""

    sequence: Ints  # [P] of each segment; the leads come first
    first: Ints  # [P] position of its first row
    behind: Ints  # [P] position behind its last one
    leads: int  # segments that are leads
    waiting: NDArray[np.bool_]  # [S] sequences whose prompt is not cached before this forward
    lead_row: Ints  # [S] row where the sequence's lead begins; -1: it is not in this forward
    rest_row: Ints  # [S] likewise of what its prompt has behind that
    keep: tuple[Ints, Ints] | None = None  # rows whose hidden states are to be kept, and where (see `Lead`)
    recalls: bool = False  # whether kept rows are among the batch's `head_rows`


@dataclass
class Batch:
    """One forward's packed rows on one rank: segments of consecutive positions, those of prompts before the windows'.

    A window's segment belongs to a sequence and a branch. A prompt that never sees its answer is a segment, or two: its
    lead and its rest; so its rows' bits do not depend on whether the lead was cached. A segment's rows see the tokens
    [0, shared) of their sequence, the columns [0, hi) of their own segment and, with a dual cache, the tokens behind
    their segment whose K/V an earlier forward left.
    """

    sequence: Ints  # [G] slot of each segment
    branch: Ints  # [G]; -1 for prompts
    start: Ints  # [G] its first row in the packed batch
    rows: Ints  # [G] its number of rows
    shared: Ints  # [G] tokens before it, which it sees
    first: Ints  # [G] position of its first row, relative to the prompt's end
    hi: Ints  # [R] own columns a row sees
    tail: tuple[Ints, Ints] | None  # [G] cached tokens seen behind the segment, with a dual cache: first and number
    begin: Ints  # [S] position of the first row of each sequence's windows
    stop: Ints  # [S] position behind their last row
    prompts: Prompts | None  # null where there are only windows
    tokens: Tensor  # [R'] ids, R' = R rounded up to ROW_TILE
    positions: Tensor  # [R'] absolute
    head_rows: Tensor  # [H] rows whose prediction is wanted; negative: kept ones
    head_slots: Tensor  # [H] where in the record buffer it goes
    head_sequence: Ints  # [H] slot whose position it is
    head_keys: Tensor | None  # [H] keys of their random numbers, where any are drawn
    local_branches: int  # records are a [local_branches, masked] buffer
    masked: int  # masked positions of all sequences (of their anchors)
    where: Tensor  # [masked] of each: W x sequence + offset in `State.window`
    width: int  # W, of the dense records
    kept: Tensor | None  # [S] bool, whose first masked position takes the record kept from the commit; null: nobody's


def layout(state: State, lengths: Lengths, rank: int = 0, ranks: int = 1, lead: Lead | None = None) -> Batch:
    """Lay out this rank's share of the next forward: branch j runs on rank j mod `ranks`.

    A prompt is prefilled by every rank, so that its K/V need not travel; with block-causal windows the same holds for
    finished blocks, whose K/V is the same in every branch (spec section 4).

    Args:
        state, lengths: the state and its host copy, of the same step.
        rank, ranks: of the branch group.
        lead: what prompts share; null where they share nothing.
    """
    config, device = state.config, state.canvas.device

    # segments
    sequence, branch, mine = window_parts(state, lengths, rank, ranks)
    begin, stop = row_span(state, lengths, lead)
    first, behind = begin[sequence], stop[sequence]
    prompts = prompt_parts(state, lengths, lead)
    if prompts:
        none = np.zeros_like(prompts.sequence)
        sequence, branch = np.append(prompts.sequence, sequence), np.append(none - 1, branch)
        first, behind = np.append(prompts.first, first), np.append(prompts.behind, behind)
        mine = np.append(none > 0, mine)
    prompt = lengths.prompt[sequence]
    rows = behind - first
    start = rows.cumsum() - rows
    shared = prompt + first  # nothing where the first row is the prompt's first
    tail = (prompt + behind, lengths.limit[sequence] - behind) if config.cache == "dual" else None

    # rows: what a segment adds to the packed row number r gives its position, its cell and its absolute position
    total = int(rows.sum())
    padded = -(-max(total, 1) // ROW_TILE) * ROW_TILE
    position = np.arange(total) + (first - start).repeat(rows)
    hi = own_columns(config, position, first, rows)
    cells, absolutes = np.zeros((2, padded + 1), np.int64)  # rows without a segment, and one more for edits of nothing
    cells[:total] = position + (sequence * state.canvas.shape[1] + state.origin).repeat(rows)
    absolutes[:total] = position + prompt.repeat(rows)

    # masked positions, one record per branch each; a head row's record goes to its `slot`
    masked = lengths.masked * (lengths.branches > 0)
    width = -(-int((lengths.end - lengths.finished).max(initial=1)) // config.block_size) * config.block_size
    amount = int(masked.sum())
    where = torch.nonzero_static(state.window(width).masked.view(-1), size=amount)[:, 0]  # no synchronisation
    wanted = masked[sequence] * mine
    heads = wanted.cumsum() - wanted  # each segment's first
    entry = np.arange(wanted.sum()) + (masked.cumsum() - masked)[sequence].repeat(wanted) - heads.repeat(wanted)
    slot = entry + (branch // ranks * amount).repeat(wanted)

    # the row that predicts the position `where` says: its own or, with the shift, the one before
    shift = int(state.vocabulary.shift)
    base = lengths.finished[sequence] + start - first - shift
    if prompts:
        place_prompts(prompts, start, lead)
    bases = (base - sequence * width).repeat(wanted)
    if shift:
        ahead = np.flatnonzero(wanted * lengths.first_masked[sequence])  # the window's first position has no own row:
        boundary = np.maximum(base, start)  # any will do, for its record was kept,
        if prompts and prompts_apart(config):  # but for the prompt's last
            answers = prompts.waiting[sequence] & (prompt > 0)
            boundary = np.where(answers, last_rows(prompts, lengths, lead)[sequence], boundary)
        bases[heads[ahead]] = (boundary - sequence * width)[ahead]

    # on the device, in one transfer
    edited = sequence * config.max_branches + np.maximum(branch, 0)
    parts = (cells, absolutes, edited, start - first, entry, bases, slot)
    sent = send(np.concatenate(parts), device)
    at_cells, positions, which, offsets, entries, at_bases, slots = sent.split([len(part) for part in parts])
    tokens = state.canvas.view(-1).index_select(0, at_cells)
    at, token = state.edits.flatten(1, 2).index_select(1, which)  # [G, E]
    tokens.scatter_(0, torch.where(at >= 0, at + offsets[:, None], padded).view(-1), token.view(-1))
    found = where[entries]
    head_sequence = sequence.repeat(wanted)
    keys = row_keys(state, send(head_sequence, device), found % width) if state.sampled.any() else None
    kept = kept_boundary(state, lengths)
    return Batch(
        sequence, branch, start, rows, shared, first, hi, tail, begin, stop, prompts, tokens[:padded],
        positions[:padded], at_bases + found, slots, head_sequence, keys, -(-config.max_branches // ranks), amount,
        where, width, send(kept, device) if kept.any() else None,
    )  # fmt: skip


def prompt_parts(state: State, lengths: Lengths, lead: Lead | None) -> Prompts | None:
    """The prompts, or parts of prompts, that are segments of their own in this forward; null where none is waiting."""
    waiting = (lengths.committed < 0) & (lengths.branches > 0)
    if state.config.cache != "block" or not waiting.any():
        return None
    led, source = (lead.tokens, lead.source) if lead else (np.zeros_like(lengths.prompt), waiting * 0 - 1)
    leads = np.nonzero(waiting & (source == np.arange(state.slots)))[0]
    rests = np.nonzero(waiting & (lengths.prompt > led))[0] if prompts_apart(state.config) else leads[:0]
    behind_lead = led - lengths.prompt
    return Prompts(
        sequence=np.append(leads, rests),
        first=np.append(-lengths.prompt[leads], behind_lead[rests]),
        behind=np.append(behind_lead[leads], 0 * rests),
        leads=len(leads),
        waiting=waiting,
        lead_row=waiting * 0 - 1,
        rest_row=waiting * 0 - 1,
    )


def place_prompts(prompts: Prompts, start: Ints, lead: Lead | None) -> None:
    """Note in which packed rows prompts are; `start` are the segments' first."""
    leads, rests = np.split(prompts.sequence, [prompts.leads])
    prompts.rest_row[rests] = start[len(leads) : len(prompts.sequence)]
    if lead:
        prompts.lead_row[leads] = start[: len(leads)]
        prompts.lead_row = np.where(lead.source >= 0, prompts.lead_row[lead.source], -1)


def last_rows(prompts: Prompts, lengths: Lengths, lead: Lead | None) -> Ints:
    """Where the hidden state of each prompt's last row will be, ``[S]``: in a packed row, or kept (see `Lead`)."""
    if not lead:
        return prompts.rest_row + lengths.prompt - 1
    leads = prompts.sequence[: prompts.leads]
    prompts.keep = prompts.lead_row[leads] + lead.tokens[leads] - 1, lead.last[leads]
    whole = (lead.tokens > 0) & (lead.tokens == lengths.prompt)
    prompts.recalls = bool((whole & prompts.waiting).any())
    return np.where(whole, lead.last, prompts.rest_row + lengths.prompt - lead.tokens - 1)


def prompts_apart(config: DecodeConfig) -> bool:
    """Whether prompts are prefilled in segments of their own: where they never see the answer, and are kept."""
    return config.cache == "block" and config.prompt_attention != "joint"


def window_parts(state: State, lengths: Lengths, rank: int, ranks: int) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """Sequences and branches of this rank's windows, and which of them it reports on.

    What must be cached and is the same in every branch is computed by every rank: by those without a branch, too, which
    then run the anchor that another rank reports on.
    """
    config = state.config
    owned = (lengths.branches - rank + ranks - 1) // ranks  # branches rank, rank + ranks, ...
    count = np.maximum(owned, 0)
    if ranks > 1 and config.cache != "none":
        prefill = (lengths.committed < 0) & (not prompts_apart(config))
        commits = (lengths.finished > lengths.committed) & (config.window_attention == "block_causal")
        count = np.maximum(count, (prefill | commits) & (lengths.branches > 0))
    sequence = np.repeat(np.arange(state.slots), count)
    mine = owned[sequence] > 0
    return sequence, np.where(mine, rank + ranks * within(count), 0), mine


def row_span(state: State, lengths: Lengths, lead: Lead | None) -> tuple[Ints, Ints]:
    """Which positions of windows go through the model: those of ``[begin, stop)``, ``[S]`` each.

    A window begins at the first uncommitted token, at the boundary row before that or, where the prompt is no segment
    of its own, at the prompt's first token behind its `lead`. It ends with the last appended block or, where the
    canvas is whole, with its last mask, unless a dual cache has the masks behind.
    """
    config = state.config
    if config.cache == "none":
        begin = -lengths.prompt
    else:
        anew = lengths.committed < 0
        if config.cache != "block":  # prefix and dual: whenever a block was finished, everything before it
            anew = lengths.committed < lengths.finished
        prompt = 0 if prompts_apart(config) else (lead.tokens if lead else 0) - lengths.prompt
        begin = np.where(anew, prompt, lengths.committed - fresh_boundary(state, lengths))
    if config.canvas == "growing":
        return begin, lengths.end
    return begin, np.where(anew, lengths.limit, lengths.end) if config.cache == "dual" else lengths.limit


def fresh_boundary(state: State, lengths: Lengths) -> NDArray[np.bool_]:
    """Where the last committed row is recomputed because the first masked position is predicted by it.

    Only a row that sees the window can have changed since its commit: with block-causal windows, and at the end of a
    prompt that sees only itself, the record kept from the commit is the same, and no row is spent.
    """
    config = state.config
    if config.boundary != "fresh" or config.window_attention != "full" or not state.vocabulary.shift:
        return np.zeros(state.slots, bool)
    sees_window = (lengths.committed > 0) | (config.prompt_attention == "joint")
    return sees_window & (lengths.committed == lengths.finished) & (lengths.first_masked > 0)


def kept_boundary(state: State, lengths: Lengths) -> NDArray[np.bool_]:
    """Where the first masked position takes the record kept from the commit."""
    config = state.config
    if config.cache == "none" or config.boundary == "fill" or not state.vocabulary.shift:
        return np.zeros(state.slots, bool)
    waiting = (lengths.committed >= 0) & (lengths.committed == lengths.finished) & (lengths.first_masked > 0)
    return waiting & ~fresh_boundary(state, lengths)


def own_columns(config: DecodeConfig, position: Ints, first: Ints, rows: Ints) -> Ints:
    """How many of its segment's columns each row sees (spec section 4), ``[R]``.

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
    end = np.where(position < 0, in_prompt, in_window)
    return np.minimum(end - first.repeat(rows), every)


def row_keys(state: State, sequence: Tensor, place: Tensor) -> Tensor:
    """Random keys by (seed, request, position, step): no rank, batch or order in them."""
    position = state.finished[sequence] + place
    return (state.key[sequence] * 0x1_0000_0001 + position) * 0x1_0000_0001 + state.step[sequence]


def unpack(state: State, batch: Batch, gathered: Tensor) -> Records:
    """Spread gathered records over ``[S, K, W]`` of `State.window`.

    Args:
        state, batch: of this step.
        gathered: ``[ranks, local_branches, masked, 3]`` int32: token, and the bits of probability and confidence.
    """
    branches = state.config.max_branches
    parts = gathered.permute(3, 1, 0, 2).flatten(1, 2)[:, :branches]  # branch j lies at rank j mod ranks, j div ranks
    dense = gathered.new_zeros(3, branches, state.slots * batch.width)
    dense.index_copy_(2, batch.where, parts)
    packed = dense.view(3, branches, state.slots, batch.width).transpose(1, 2)
    if batch.kept is not None:
        first = packed[..., 0]
        torch.where(batch.kept[:, None], state.boundary.packed[..., None], first, out=first)
    return Records(packed)
