"""From one step to the next: apply the winner, fill, move the frontiers, append, finish, spawn branches."""

from __future__ import annotations

import torch
from torch import Tensor

from lopa_dist.decode.state import Records, State


def advance(state: State, records: Records, winner: Tensor) -> None:
    """Move every running sequence by one step, in place (spec sections 1-3, DESIGN section 2).

    Args:
        state: as it was laid out for the forward.
        records: ``[S, K, W]`` over `state.span(W)`, W a multiple of the block size and at least end - finished.
        winner: ``[S]`` from `select`.
    """
    config, mask_id = state.config, state.vocabulary.mask_id
    slots, _, width = records.token.shape
    size, blocks = config.block_size, width // config.block_size
    running = ~state.done
    at = winner[:, None, None]
    span = state.span(width)
    inside = (span < state.end[:, None]) & running[:, None]
    won = Records(*(r.gather(1, at.expand(-1, 1, width))[:, 0] for r in records))  # [S, W] of the winner
    keep_boundary(state, won, running)
    if config.cache == "block":
        state.committed = torch.where(running, state.finished, state.committed)

    # the winner's edits become the sequence's tokens
    columns = state.origin + span
    window = state.canvas.gather(1, columns)  # [S, W]
    edit_at = state.edit_position.gather(1, at.expand(-1, 1, state.edit_position.shape[2]))[:, 0]  # [S, E]
    edit_token = state.edit_token.gather(1, at.expand(-1, 1, state.edit_token.shape[2]))[:, 0]
    hit = edit_at[..., None] == span[:, None]  # [S, E, W]
    window = torch.where(hit.any(1) & inside, (hit * edit_token[..., None]).sum(1), window)
    masked = (window == mask_id) & inside

    # activation: a block that is nearly full lets the next one be forced (sticky, not chained)
    first = state.finished // size  # number of the window's first block
    number = first[:, None] + torch.arange(blocks, device=window.device)  # [S, blocks]
    total = (state.end[:, None] - number * size).clamp(0, size)
    appended = (total > 0) & running[:, None]
    nearly = (total - masked.view(slots, blocks, size).sum(2)) / total >= config.tau_act
    full = state.full.gather(1, number)
    full[:, 0] |= running  # everything before the window is complete
    full[:, 1:] |= nearly[:, :-1] & appended[:, 1:]
    state.full.scatter_(1, number, full)

    chosen = fill(state, won, masked, full)
    window = torch.where(chosen, won.token.long(), window)
    state.canvas.scatter_(1, columns, window)
    masked &= ~chosen
    is_eos = torch.isin(window, torch.tensor(state.vocabulary.eos_ids, device=window.device)) & inside
    state.eos |= is_eos.any(1)

    # frontiers and the next block
    holes = masked.view(slots, blocks, size).sum(2)
    complete = ((holes == 0) & appended).long().cumprod(1).sum(1)  # leading complete blocks
    end = state.end
    state.finished = torch.where(running, torch.minimum(state.finished + complete * size, end), state.finished)
    last = ((end - 1) // size - first).clamp(min=0)[:, None]
    progress = ((total - holes) / total).gather(1, last)[:, 0]
    append = running & ~state.eos & (end < state.limit) & (progress >= config.tau_add)
    if config.max_active_blocks is not None:
        append &= (end - state.finished + size - 1) // size < config.max_active_blocks
    state.end = torch.where(append, torch.minimum(end + size, state.limit), end)

    # finished: nothing left to fill, or an EOS with nothing masked before it
    over = ~masked.any(1) & ~append
    if config.stop_at_eos:
        places = torch.arange(width, device=window.device)
        first_masked = torch.where(masked, places, width).amin(1)
        over |= torch.where(is_eos, places, width).amin(1) < first_masked
    state.done |= over & running
    state.step += running
    state.winner = winner
    spawn(state, won, masked, span)


def keep_boundary(state: State, won: Records, running: Tensor) -> None:
    """Remember what a committing forward said of the first position behind the cache (boundary=stale)."""
    commits = running & ((state.committed < 0) | (state.committed < state.finished))
    state.boundary = Records(
        *(torch.where(commits, new[:, 0], old) for new, old in zip(won, state.boundary, strict=True))
    )


def fill(state: State, won: Records, masked: Tensor, full: Tensor) -> Tensor:
    """Which masked positions of the window are filled in this step, ``[S, W]`` bool."""
    config = state.config
    slots, width = masked.shape
    size = config.block_size
    passed = masked & (won.probability > config.tau_conf)
    ranked = torch.where(masked, won.confidence, -torch.inf)
    if config.force == "block":
        per_block = (slots, width // size, size)
        stuck = full & ~passed.view(per_block).any(2)  # [S, blocks]
        chosen = passed | (first_max(ranked.view(per_block)) & stuck[..., None]).view(slots, width) & masked
    else:
        stuck = ~passed.any(1, keepdim=True)
        places = torch.arange(width, 0, -1, device=masked.device)
        best = ranked if config.force == "window" else torch.where(masked, places, 0)
        chosen = passed | first_max(best) & stuck & masked
    if config.extra_fill:
        rest = masked & ~chosen
        rank = torch.where(rest, won.confidence, -torch.inf).sort(dim=1, descending=True, stable=True).indices
        extra = torch.zeros_like(rest).scatter_(1, rank[:, : config.extra_fill], True)
        chosen = chosen | extra & rest
    return chosen


def first_max(x: Tensor) -> Tensor:
    """Marks the leftmost maximum along the last dimension."""
    places = torch.arange(x.shape[-1], device=x.device)
    at = torch.where(x == x.amax(-1, keepdim=True), places, x.shape[-1]).amin(-1, keepdim=True)
    return places == at


def spawn(state: State, won: Records, masked: Tensor, span: Tensor) -> None:
    """Make the next forward's branches: the anchor, and lookaheads at its most confident masked positions.

    They take the tokens of this step's records, so no forward is spent on drafting (spec section 3).
    """
    config = state.config
    k = config.branches
    if k == 0:
        state.branches = (~state.done).long()
        return
    candidates = masked & (won.probability >= config.tau_look)
    ranked, rank = torch.where(candidates, won.confidence, -torch.inf).sort(dim=1, descending=True, stable=True)
    rank, ranked = rank[:, :k], ranked[:, :k]
    state.edit_position.fill_(-1)
    found = candidates.gather(1, rank)  # [S, k']
    position = torch.where(found, span.gather(1, rank), -1)
    token = won.token.gather(1, rank).long()
    count = rank.shape[1]  # the window may be shorter than k
    if config.lookahead == "single":
        state.edit_position[:, 1 : count + 1, 0] = position
        state.edit_token[:, 1 : count + 1, 0] = token
        created = ranked.double()
    else:
        nested = torch.ones(count, count, dtype=torch.bool, device=span.device).tril()  # branch j takes j edits
        state.edit_position[:, 1 : count + 1, :count] = torch.where(nested, position[:, None], -1)
        state.edit_token[:, 1 : count + 1, :count] = token[:, None]
        created = torch.where(found, ranked, 0.0).double().cumsum(1) / torch.arange(1, count + 1, device=span.device)
    state.edit_confidence[:, 1 : count + 1] = torch.where(found, created, 0.0)
    state.branches = torch.where(state.done, 0, 1 + found.sum(1))
