"""From one step to the next: apply the winner, fill, move the frontiers, append, finish, spawn branches."""

from __future__ import annotations

import torch
from torch import Tensor

from lopa_dist.decode.state import Records, State, places


def advance(state: State, records: Records, winner: Tensor) -> None:
    """Move every running sequence by one step, in place (spec sections 1-3, DESIGN section 2).

    Slots that are done pass through the same operations; nothing of theirs is inside the window, so nothing fills.

    Args:
        state: as it was laid out for the forward.
        records: ``[S, K, W]`` over `state.window(W)`, W a multiple of the block size and at least end - finished.
        winner: ``[S]`` from `select`.
    """
    config, mask_id = state.config, state.vocabulary.mask_id
    slots, _, width = records.packed.shape[1:]
    size, end = config.block_size, state.end
    by_block = (slots, width // size, size)
    span, window, inside, _ = state.window(width)
    each = places(slots, window.device)
    won = Records(records.packed[:, each, winner])  # [S, W]
    running = state.ended == 0
    keep_boundary(state, won, running)
    if config.cache != "none":
        torch.where(running, state.finished, state.committed, out=state.committed)

    # the winner's edits become the sequence's tokens
    edit_at, edit_token = state.edits[:, each, winner, :, None].unbind()  # [S, E, 1]
    for e in range(config.max_edits):
        window = torch.where(edit_at[:, e] == span, edit_token[:, e], window)
    masked = (window == mask_id) & inside

    # activation: a block that is nearly full lets the next one be forced; everything before the window is complete.
    # Nothing filled is ever masked again, so a block that was nearly full remains so: there is no need to remember it
    total = (end[:, None] - span[:, ::size]).clamp(0, size)  # [S, blocks] positions of each block, 0 behind the last
    nearly = (total - masked.view(by_block).sum(2)) / total >= config.tau_act
    full = torch.cat([running[:, None], nearly[:, :-1]], 1)  # [S, blocks]

    fillable = masked if config.sub_block_size is None else first_parts(masked, size, config.sub_block_size)
    chosen = fill(state, won, fillable, full)
    if config.boundary == "fill" and state.vocabulary.shift and config.cache != "none":
        # the window's first position: masked in the forward that fills the cache, which gives nothing else (Fast-dLLM)
        chosen = torch.where(masked[:, :1], places(width, window.device) == 0, chosen)
    window = torch.where(chosen, won.token, window)
    state.answers.scatter_(1, span, window)
    masked ^= chosen  # all that is chosen was masked
    is_eos = (window[..., None] == state.eos_ids).any(2) & inside
    if config.prompt_attention == "blocks":
        is_eos &= span >= state.known[:, None]
    state.eos |= is_eos.any(1)

    # frontiers and the next block
    first = torch.where(masked, span, end[:, None]).amin(1)  # the first masked position; `end` where there is none
    finished = torch.where(first < end, first - first % size, end)  # end of the leading complete blocks
    holes = masked.view(by_block).sum(2)
    last = (total[:, 1:] > 0).sum(1, keepdim=True)  # [S, 1] number of the last block in the window
    progress = ((total - holes) / total).gather(1, last)[:, 0]
    append = (progress >= config.tau_add) & running & ~state.eos
    if config.max_active_blocks is not None:
        append &= (end - finished + size - 1) // size < config.max_active_blocks
    new_end = torch.minimum(torch.add(end, append, alpha=size), state.limit)

    # finished: nothing left to fill, or an EOS with nothing masked before it
    left = holes.sum(1) + new_end - end
    over = left == 0
    if config.stop_at_eos:
        over |= (is_eos & (span < first[:, None])).any(1)
    state.ended |= over
    state.step += running
    state.winner.copy_(winner)
    # the first position behind `finished` is masked, if only because its block was appended just now
    torch.eq(first, finished, out=state.first_masked)
    state.first_masked &= finished < new_end
    state.finished.copy_(finished)
    state.end.copy_(new_end)
    state.masked.copy_(left)
    spawn(state, won, masked, span)
    state.close_window()


def keep_boundary(state: State, won: Records, running: Tensor) -> None:
    """Remember what a committing forward said of the first position behind the cache (boundary=stale)."""
    if state.vocabulary.shift and state.config.cache != "none":
        commits = running & (state.committed != state.finished)
        kept = state.boundary.packed
        torch.where(commits, won.packed[:, :, 0], kept, out=kept)


def first_parts(masked: Tensor, block: int, size: int) -> Tensor:
    """Of every block's masked positions ``[S, W]``, those of its first sub-block that has any.

    Fast-dLLM v2 fills a block from left to right, `size` tokens at a time, while it sees the whole of it.
    """
    parts = masked.view(len(masked), -1, block // size, size)
    has = parts.any(3)  # [S, blocks, sub-blocks]
    return (parts & (has & (has.cumsum(2) == 1))[..., None]).view_as(masked)


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
        forced = (first_max(ranked.view(per_block)) & stuck[..., None]).view(slots, width)
    else:
        stuck = ~passed.any(1, keepdim=True)
        forced = first_max(ranked if config.force == "window" else masked.long()) & stuck
    chosen = passed | forced & masked
    if config.extra_fill:
        rest = masked & ~chosen
        rank = won.confidence.masked_fill(~rest, -torch.inf).sort(dim=1, descending=True, stable=True).indices
        extra = torch.zeros_like(rest).scatter_(1, rank[:, : config.extra_fill], True)
        chosen = chosen | extra & rest
    return chosen


def first_max(x: Tensor) -> Tensor:
    """Marks the leftmost maximum along the last dimension (argmax takes the first of equals)."""
    return places(x.shape[-1], x.device) == x.argmax(-1, keepdim=True)


def spawn(state: State, won: Records, masked: Tensor, span: Tensor) -> None:
    """Make the next forward's branches: the anchor, and lookaheads at its most confident masked positions.

    They take the tokens of this step's records, so no forward is spent on drafting (spec section 3).
    """
    config = state.config
    k = config.branches
    if k == 0:
        state.branches.copy_(state.ended == 0)
        return
    if config.sub_block_size is not None:
        masked = first_parts(masked, config.block_size, config.sub_block_size)
    candidates = masked & (won.probability >= config.tau_look) if config.tau_look else masked
    ranked, rank = torch.where(candidates, won.confidence, -torch.inf).sort(dim=1, descending=True, stable=True)
    ranked, rank = ranked[:, :k], rank[:, :k]  # [S, k'] candidates first; branches of what is behind them do not run
    made = torch.stack([span.gather(1, rank), won.token.gather(1, rank)])  # [2, S, k']
    count = rank.shape[1]  # the window may be shorter than k
    if config.lookahead == "single":
        state.edits[:, :, 1 : count + 1, 0] = made
    else:
        nested = torch.ones(count, count, dtype=torch.bool, device=span.device).tril()  # branch j takes j edits
        state.edit_position.fill_(-1)
        state.edits[:, :, 1 : count + 1, :count] = made[:, :, None].masked_fill(~nested, -1)
        ranked = ranked.double().cumsum(1) / places(count + 1, span.device)[1:]
    state.edit_confidence[:, 1 : count + 1] = ranked
    torch.clamp(candidates.sum(1) + 1, max=k + 1, out=state.branches)
    state.branches.masked_fill_(state.ended != 0, 0)
