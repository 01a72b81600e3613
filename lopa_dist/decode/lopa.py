"""LoPA's part of a step: which branch wins (`verify`), and the branches of the next forward (`spawn`).

A rule of verification is a function ``(state, records) -> Winner`` in the table `VERIFY`. Whatever it chooses, D2F's
part of the step (`advance`) writes the tokens that the winner brings, and fills from the winner's records.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lopa_dist.decode.advance import active_blocks, block_lengths, fill
from lopa_dist.decode.config import DecodeConfig
from lopa_dist.decode.state import Records, State, arange
from lopa_dist.decode.winner import Winner

ALL_FILLED = 1.0  # confidence of a branch that leaves nothing masked


def verify(state: State, records: Records) -> Winner:
    """Choose a branch of every sequence by the rule `DecodeConfig.verify`.

    Args:
        state: as it was laid out for the forward.
        records: ``[S, K, W]`` over `state.window(W)`.
    """
    return VERIFY[state.config.verify](state, records)


def by_confidence(state: State, records: Records) -> Winner:
    """LoPA as published: the branch with the highest confidence in what it leaves masked wins (Eq. 2).

    Ties go to the lookahead branch that was created with the highest confidence, and to the anchor last.
    """
    if state.config.branches == 0:
        return anchor_alone(state, records)
    width = records.packed.shape[-1]
    window = state.window(width)
    k = arange(state.config.max_branches, window.span.device)
    open_ = window.masked[:, None]  # [S, K, W] what a branch leaves masked
    for position in state.edit_position[..., None].unbind(2):
        open_ = open_ & (position != window.span[:, None])
    scores = branch_confidence(state.config, records.confidence, open_, state.edit_confidence)
    scores = scores.masked_fill(k >= state.branches[:, None], -torch.inf)
    # argmax takes the first of equals: the lookaheads by rank, then the anchor
    branch = (scores.roll(-1, 1).argmax(1) + 1) % len(k)
    return winning(state, records, branch, scores)


def winning(state: State, records: Records, branch: Tensor, scores: Tensor | None = None) -> Winner:
    """Return `branch` ``[S]`` as the winner, which brings all that it differs in from the anchor."""
    slots = arange(state.slots, branch.device)
    position, token = state.edits[:, slots, branch].unbind()
    return Winner(branch, Records(records.packed[:, slots, branch]), position, token, scores)


def anchor_alone(state: State, records: Records) -> Winner:
    """Return the anchor as the winner, where there are no other branches: it brings nothing."""
    position, token = state.edits[:, :, 0]
    return Winner(state.branches.new_zeros(state.slots), Records(records.packed[:, :, 0]), position, token)


def by_agreement(state: State, records: Records) -> Winner:
    """Drafts are accepted as long as the model predicts their tokens in the context of the drafts before them.

    The first draft that fails gives way to what the model predicts instead. So every token of the chain is the model's
    own choice in the context that it is placed into. The branch that has this context wins. It does not bring tokens
    that are less probable there than `DecodeConfig.tau_verify`.
    """
    config = state.config
    slots, index = (arange(n, state.canvas.device) for n in (state.slots, config.max_chain))
    assert records.drafts is not None
    position, draft, predicted = *state.chain, records.drafts.token  # [S, C]
    probable = records.drafts.probability >= config.tau_verify  # false where it is NaN
    agrees = (predicted == draft) & (index < state.drafts[:, None]) & probable
    accepted = agrees.cumprod(1).sum(1)  # [S]
    branch = torch.minimum(accepted // config.drafts, state.branches - 1).clamp(min=0)
    token = torch.where(index < accepted[:, None], draft, predicted)
    brought = (index <= torch.minimum(accepted, state.drafts - 1)[:, None]) & probable
    winner = Records(records.packed[:, slots, branch])
    return Winner(branch, winner, torch.where(brought, position, -1), token, accepted=accepted)


def by_plain_steps(state: State, records: Records, exact: bool) -> Winner:
    """FreeDave: a branch is accepted if it is what a step of plain decoding makes of a branch that was accepted.

    Branch 0 is accepted. From the last accepted branch b, what plain decoding would fill next is known from its own
    records. The deepest branch that holds nothing but such tokens is accepted next, and so on (arXiv 2510.00294).

    Args:
        state, records: as for `verify`; the branches are nested.
        exact: a branch must hold all that the plain step fills, not only a part of it. Where blocks are filled one
            after the other, the text then is plain decoding's own (at temperature 0, for noise is drawn by
            step, and not with cache=token, where what is kept depends on the number of forwards).
    """
    if state.config.branches == 0:
        return anchor_alone(state, records)
    config, (slots, branches, width) = state.config, records.packed.shape[1:]
    window = state.window(width)
    steps = arange(branches, window.span.device)
    position, token = state.edits[:, :, steps[1:], steps[1:] - 1]  # [S, k] what branch j adds to branch j - 1
    edited = (state.edit_position[..., None] == window.span[:, None, None]).any(2)  # [S, K, W]
    masked = (window.masked[:, None] & ~edited).flatten(0, 1)  # of the branches, [S K, W]
    total, running = block_lengths(config, state.end, window.span), state.done == 0
    of_branches = arange(slots * branches, window.span.device) // branches
    full = active_blocks(config, masked, total[of_branches], running[of_branches])
    own = Records(records.packed.flatten(1, 2))
    chosen = fill(config, own, state.fillable(masked), full).view(slots, branches, width)

    offset = (position - state.complete[:, None]).clamp(0, width - 1)[:, None].expand(-1, branches, -1)  # [S, K, k]
    holds = steps[1:] <= steps[:, None]  # [K, k] what branch b holds already
    same = chosen.gather(2, offset) & (records.token.gather(2, offset) == token[:, None])
    depth = (holds | same).cumprod(2)  # [S, K, k] whether the first j tokens all are in branch b's plain step
    depth = depth * (steps[1:] < state.branches[:, None, None])
    if exact:
        depth = depth * (chosen.sum(2)[..., None] == steps[1:] - steps[:, None])
    follower = torch.maximum((depth * steps[1:]).amax(2), steps)  # [S, K] the deepest branch that follows b, or b
    for _ in range(branches.bit_length()):  # followers of followers
        follower = follower.gather(1, follower)
    return winning(state, records, follower[:, 0])


VERIFY: dict[str, Callable[[State, Records], Winner]] = {
    "confidence": by_confidence,
    "agreement": by_agreement,
    "plain_subset": partial(by_plain_steps, exact=False),
    "plain_exact": partial(by_plain_steps, exact=True),
}
"""The rules of verification, by their names in `DecodeConfig.verify`."""


def spawn(state: State, winner: Winner) -> None:
    """Make the branches of the next forward: the anchor, and lookaheads at its most confident masked positions.

    The lookaheads take the tokens of the winner's records, so no forward is spent on drafting (LoPA, section 3).

    Args:
        state: after `advance`, whose windows it still holds.
        winner: of this step.
    """
    config, records = state.config, winner.records
    most = config.max_chain or config.branches  # candidates that are of use
    if most:
        span, _, _, masked = state.window(records.packed.shape[-1])
        masked = state.fillable(masked)
        candidates = masked & (records.probability >= config.tau_look) if config.tau_look else masked
        if config.drafts > 1 and config.window_attention == "block_causal":
            # drafts see one another, so all are in one block: the first that has masks (`draft_rows`)
            candidates = candidates & (span < (state.complete + config.block_size)[:, None])
        ranked, rank = torch.where(candidates, records.confidence, -torch.inf).sort(dim=1, descending=True, stable=True)
        ranked, rank = ranked[:, :most], rank[:, :most]  # [S, n] candidates first; what is behind them is not used
        made = torch.stack([span.gather(1, rank), records.token.gather(1, rank)])  # [2, S, n]
        count = candidates.sum(1)
        if config.verify == "agreement":
            branches = spawn_chain(state, made, count)
        else:
            branches = spawn_lookaheads(state, made, ranked, count)
        state.branches.copy_(branches).masked_fill_(state.done != 0, 0)
    else:
        state.branches.copy_(state.done == 0)
    state.set_window(None)


def spawn_lookaheads(state: State, made: Tensor, ranked: Tensor, count: Tensor) -> Tensor:
    """Branch j fills the j-th candidate (lookahead=single), or the first j (nested).

    Args:
        state: gets the branches' edits.
        made: ``[2, S, n]`` positions and tokens of the best candidates; n is k, or less where windows are short.
        ranked: ``[S, n]`` their confidences.
        count: ``[S]`` how many candidates there are.

    Returns:
        ``[S]`` branches to run, the anchor included.
    """
    config, n = state.config, made.shape[2]
    if config.lookahead == "single":
        state.edits[:, :, 1 : n + 1, 0] = made
    else:
        nested = torch.ones(n, n, dtype=torch.bool, device=made.device).tril()  # branch j takes j edits
        state.edit_position.fill_(-1)
        state.edits[:, :, 1 : n + 1, :n] = made[:, :, None].masked_fill(~nested, -1)
        ranked = ranked.double().cumsum(1) / arange(n + 1, made.device)[1:]
    state.edit_confidence[:, 1 : n + 1] = ranked
    return (count + 1).clamp(max=config.max_branches)


def spawn_chain(state: State, made: Tensor, count: Tensor) -> Tensor:
    """The candidates are drafts; branch b has the first ``b * m`` of them filled and verifies the m behind these.

    Args:
        state: gets the chain of drafts, their number and the branches' edits.
        made: ``[2, S, n]`` positions and tokens of the best candidates; n is (k + 1) * m, or less.
        count: ``[S]`` how many candidates there are.

    Returns:
        ``[S]`` branches to run: those that have a draft to verify, and the anchor.
    """
    config, n = state.config, made.shape[2]
    state.chain[:, :, :n] = made
    if config.drafts > 1 and state.vocabulary.shift:
        state.chain_context.copy_(contexts(state))
    torch.clamp(count, max=config.max_chain, out=state.drafts)
    state.drafts.masked_fill_(state.done != 0, 0)
    edits = min(config.branches * config.drafts, n)
    if edits:
        device = made.device
        filled = arange(edits, device) < (arange(config.max_branches, device) * config.drafts)[:, None]  # [K, E]
        state.edits[:, :, :, :edits] = torch.where(filled, made[:, :, None, :edits], -1)
    return (state.drafts + config.drafts - 1).div(config.drafts, rounding_mode="floor").clamp(min=1)


def contexts(state: State) -> Tensor:
    """Return the token before each draft's position ``[S, C]``, from which a model with the shift predicts the draft.

    It is that of an earlier draft where one stands there, and else that of the sequence. Behind the drafts, `chain`
    holds those of earlier steps; what is found for them is not used, but their rows run, so it has to be a token.
    """
    position, token = state.chain
    before = position - 1
    number = arange(position.shape[1], position.device)
    drafted = (position[:, None] == before[..., None]) & (number < number[:, None])  # [S, C, C] by an earlier one
    written = state.canvas.gather(1, (before + state.origin).clamp_(min=0))
    return torch.where(drafted.any(2), (token[:, None] * drafted).amax(2), written)


def branch_confidence(config: DecodeConfig, confidence: Tensor, open_: Tensor, created: Tensor) -> Tensor:
    """Score every branch by how sure the model is of what the branch leaves to be filled (LoPA, Eq. 2).

    Args:
        config: `score`, `score_fraction`, `score_window` and `alpha` are read.
        confidence: ``[S, K, W]`` of each branch's predictions.
        open_: ``[S, K, W]`` bool, the positions that a branch leaves masked.
        created: ``[S, K]`` confidence that a branch was created with (1 for the anchor).

    Returns:
        ``[S, K]`` fp64: the mean (or its variant) over a branch's open positions, mixed with `created` by `alpha`.
    """
    # sums in fp64 are exact: how wide the batch's windows are changes no rounding
    count = open_.sum(-1)  # [S, K]
    if config.score == "mean":
        level = confidence.double().mul_(open_).sum(-1) / count
    elif config.score == "gain":
        exact = confidence.double()
        level = exact.sub_(confidence[:, :1]).mul_(open_).sum(-1) / count
    elif config.score == "lowest_fraction":
        lowest = confidence.double().masked_fill(~open_, torch.inf).sort(-1).values
        # round before the floor: in binary, 100 * 0.29 is below 29
        keep = torch.floor((count.double() * config.score_fraction * 1e9).round() / 1e9).long().clamp(min=1)
        ranks = torch.arange(open_.shape[-1], device=open_.device)
        level = torch.where(ranks < keep[..., None], lowest, 0.0).sum(-1) / keep
    else:
        level = _weakest_run(confidence.double().masked_fill(~open_, 0.0), open_, count, config.score_window)
    level = level.masked_fill(count == 0, ALL_FILLED)
    return config.alpha * created + (1 - config.alpha) * level if config.alpha else level


def _weakest_run(known: Tensor, open_: Tensor, count: Tensor, window: int) -> Tensor:
    """Return the least mean over `window` consecutive open positions, or over all of them where fewer are open."""
    order = torch.argsort(~open_, dim=-1, stable=True)  # open positions first, in position order
    run = count.clamp(1, window)[..., None]  # [S, K, 1]
    total = known.gather(-1, order).cumsum(-1)  # [S, K, W]
    ends = torch.arange(known.shape[-1], device=known.device).expand_as(total)
    before = torch.where(ends >= run, total.gather(-1, (ends - run).clamp(min=0)), 0.0)
    complete = (ends + 1 >= run) & (ends < count[..., None])
    return torch.where(complete, (total - before) / run, torch.inf).amin(-1)
