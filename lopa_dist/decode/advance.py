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
    size, blocks = config.block_size, width // config.block_size
    span, columns, window, inside, masked = state.window(width)
    by_block = (slots, blocks, size)
    won = Records(records.packed.gather(2, winner[None, :, None, None].expand(3, slots, 1, width))[:, :, 0])  # [S, W]
    running = state.ended == 0
    keep_boundary(state, won, running)
    if config.cache != "none":
        state.committed.copy_(torch.where(running, state.finished, state.committed))

    # the winner's edits become the sequence's tokens
    edit_shape = (2, slots, 1, config.max_edits)
    edit_at, edit_token = state.edits.gather(2, winner[None, :, None, None].expand(edit_shape))[:, :, 0]  # [S, E]
    for at, token in zip(edit_at.split(1, 1), edit_token.split(1, 1), strict=True):
        window = torch.where(at == span, token, window)
    masked = (window == mask_id) & inside

    # activation: a block that is nearly full lets the next one be forced (sticky, not chained)
    end = state.end.clone()
    first = state.finished // size  # number of the window's first block
    number = first[:, None] + places(blocks, window.device)  # [S, blocks]
    total = (end[:, None] - number * size).clamp(0, size)
    appended = total > 0
    nearly = (total - masked.view(by_block).sum(2)) / total >= config.tau_act
    full = state.full.gather(1, number)
    full[:, 0] = True  # everything before the window is complete
    full[:, 1:] |= nearly[:, :-1] & appended[:, 1:]
    state.full.scatter_(1, number, full)

    fillable = masked if config.sub_block_size is None else first_parts(masked, size, config.sub_block_size)
    chosen = fill(state, won, fillable, full)
    if config.boundary == "fill" and state.vocabulary.shift and config.cache != "none":
        # the window's first position: masked in the forward that fills the cache, which gives nothing else (Fast-dLLM)
        chosen = torch.where(masked[:, :1], places(width, window.device) == 0, chosen)
    window = torch.where(chosen, won.token.long(), window)
    state.canvas.scatter_(1, columns, window)
    masked = masked & ~chosen
    is_eos = (window[..., None] == state.eos_ids).any(2) & inside
    if config.prompt_attention == "blocks":
        is_eos &= span >= state.known[:, None]
    state.eos |= is_eos.any(1)

    # frontiers and the next block
    holes = masked.view(by_block).sum(2)
    complete = ((holes == 0) & appended).cumprod(1).sum(1)  # leading complete blocks
    finished = torch.minimum(state.finished + complete * size, end)
    last = ((end - 1) // size - first).clamp(min=0)[:, None]
    progress = ((total - holes) / total).gather(1, last)[:, 0]
    append = ~state.eos & (end < state.limit) & (progress >= config.tau_add) & running
    if config.max_active_blocks is not None:
        append &= (end - finished + size - 1) // size < config.max_active_blocks
    new_end = torch.where(append, torch.minimum(end + size, state.limit), end)

    # finished: nothing left to fill, or an EOS with nothing masked before it
    left = holes.sum(1) + new_end - end
    over = left == 0
    if config.stop_at_eos:
        over = over | (is_eos & (masked.cumsum(1) == 0)).any(1)
    state.ended |= over
    state.step += running
    state.winner.copy_(winner)
    # the first position behind `finished` is masked, or it is the first of a block that was appended just now
    reached = (finished - state.finished)[:, None]
    state.first_masked.copy_(masked.gather(1, reached.clamp(max=width - 1))[:, 0] | ((finished == end) & append))
    state.finished.copy_(finished)
    state.end.copy_(new_end)
    state.masked.copy_(left)
    spawn(state, won, masked, span)
    state.close_window()


def keep_boundary(state: State, won: Records, running: Tensor) -> None:
    """Remember what a committing forward said of the first position behind the cache (boundary=stale)."""
    if state.vocabulary.shift and state.config.cache != "none":
        commits = running & (state.committed != state.finished)
        state.boundary = Records(torch.where(commits, won.packed[:, :, 0], state.boundary.packed))


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
    ranked = won.confidence.masked_fill(~masked, -torch.inf)
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
    ranked, rank = won.confidence.masked_fill(~candidates, -torch.inf).sort(dim=1, descending=True, stable=True)
    rank, ranked = rank[:, :k], ranked[:, :k]
    found = candidates.gather(1, rank)  # [S, k']
    made = torch.stack([span.gather(1, rank).masked_fill(~found, -1), won.token.gather(1, rank)])  # [2, S, k']
    count = rank.shape[1]  # the window may be shorter than k
    state.edit_position.fill_(-1)
    created = ranked.double()
    if config.lookahead == "single":
        state.edits[:, :, 1 : count + 1, 0] = made
    else:
        nested = torch.ones(count, count, dtype=torch.bool, device=span.device).tril()  # branch j takes j edits
        state.edits[:, :, 1 : count + 1, :count] = made[:, :, None].masked_fill(~nested, -1)
        created = created.masked_fill(~found, 0.0).cumsum(1) / places(count + 1, span.device)[1:]
    state.edit_confidence[:, 1 : count + 1] = created.masked_fill(~found, 0.0)
    state.branches.copy_((found.sum(1) + 1).masked_fill(state.ended != 0, 0))
