"""Verified lookahead: a tree of drafts (verify=agreement).

The most confident masked positions, with the tokens predicted there, are *drafts* d_1, d_2, ... The anchor verifies the
first m of them: a draft is accepted if all before it are and the forward, in their context, predicts its token.

Most chains of drafts fail before their end, and where one fails the model most often says its second choice. So the
other branches are *paths*: choices for the first drafts, of which some are second choices. A branch holds the tokens of
its path filled, and verifies the m drafts behind it. Its weight is the product of its choices' probabilities, which is
how probable it is that verification comes this way; the k paths of largest weight run. Paths with up to two second
choices count, and those that go on behind m drafts of another branch, if all of these are accepted.

Verification walks from the anchor. Where the drafts of a branch end, or one is rejected, and a path goes on with the
token that the model says there, the walk goes on in its branch. Where the walk ends, the model's own token is filled,
and that branch wins. So every token that the winner brings is the model's own choice in the context that it is placed
into.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from lopa_dist.decode.config import DecodeConfig
from lopa_dist.decode.state import Records, State, arange
from lopa_dist.decode.winner import Winner, anchor_alone

LEAST = -1e3  # of the logarithm of a probability, so that sums and differences of them are numbers
TIE = 1e-9  # of log weights: of paths as good as equal the less deep comes first, and the one with the first choice


def most_candidates(config: DecodeConfig) -> int:
    """Return how many drafts are of use: those of the deepest path, and m behind it."""
    return config.drafts + (config.max_edits if config.branches else 0)


def by_agreement(state: State, records: Records) -> Winner:
    """Walk from the anchor to the branch where verification ends, which wins.

    Args:
        state: as it was laid out for the forward.
        records: ``[S, K, W]``; `Records.drafts` ``[S, K x m]`` is what the forward predicts at each branch's drafts.
    """
    config = state.config
    if not config.drafts:
        return anchor_alone(state, records)
    slots, branches, m = state.slots, config.max_branches, config.drafts
    number = arange(m, state.canvas.device)
    assert records.drafts is not None
    position, draft, predicted, sure = (
        x.view(slots, branches, m) for x in (*state.chain, records.drafts.token, records.drafts.probability)
    )
    depth, _, _, drafts = state.paths
    valid = (number < drafts[..., None]) & ~sure.isnan()  # rows of drafts may overflow
    accepted = ((predicted == draft) & valid).cumprod(2).sum(2)  # [S, K]
    branch = end_of_walk(state, predicted, accepted) if config.branches else depth.new_zeros(slots)

    at = arange(slots, branch.device)
    accepted, valid = accepted[at, branch], valid[at, branch]
    token = torch.where(number < accepted[:, None], draft[at, branch], predicted[at, branch])
    position = torch.where((number <= accepted[:, None]) & valid, position[at, branch], -1)
    if config.branches:
        path_position, path_token = state.edits[:, at, branch]
        position, token = torch.cat([path_position, position], 1), torch.cat([path_token, token], 1)
        accepted = accepted + depth[at, branch]
    return Winner(branch, Records(records.packed[:, at, branch]), position, token, accepted=accepted)


def end_of_walk(state: State, predicted: Tensor, accepted: Tensor) -> Tensor:
    """Return the branch where the walk from the anchor ends, ``[S]``.

    Args:
        state: as it was laid out for the forward.
        predicted: ``[S, K, m]`` tokens at each branch's drafts.
        accepted: ``[S, K]`` of each branch's drafts, if the walk comes to it.
    """
    _, branches, m = predicted.shape
    depth, parent, token, _ = state.paths
    # the draft of the parent at whose place a path has its last token
    at = (depth - 1 - depth.gather(1, parent)).clamp(min=0)
    says = predicted.flatten(1).gather(1, parent * m + at) == token
    number = arange(branches, depth.device)
    reached = says & (accepted.gather(1, parent) >= at) & (number < state.branches[:, None]) | (number == 0)
    for _ in range((branches - 1).bit_length()):  # from its parent, from where that leads, and so on to the anchor
        reached = reached & reached.gather(1, parent)
        parent = parent.gather(1, parent)
    return torch.where(reached, depth, -1).argmax(1)  # what is reached lies on one path


def spawn_tree(state: State, records: Records, rank: Tensor, made: Tensor, count: Tensor) -> Tensor:
    """Choose the paths of the next forward, and the drafts that each verifies.

    Args:
        state: gets the branches' paths, edits and drafts.
        records: ``[S, W]`` of the winner.
        rank: ``[S, n]`` columns of the candidates in `records`, the most confident first.
        made: ``[2, S, n]`` their positions and tokens.
        count: ``[S]`` how many candidates there are.

    Returns:
        ``[S]`` branches to run, the anchor included.
    """
    config, (slots, n), device = state.config, rank.shape, rank.device
    m = config.drafts
    count = count.clamp(max=n).masked_fill(state.done != 0, 0)
    branches = torch.ones_like(count)
    depth = state.paths[0]
    if config.branches:
        branches = choose_paths(state, records, rank, made, count)

    # every branch has rows for the same number of drafts: where fewer are left, those of its own path fill up
    number = arange(m, device)
    order = (depth[..., None] + number).view(slots, -1) % count.clamp(min=1)[:, None]  # [S, K x m]
    state.chain.copy_(made.gather(2, order.expand(2, -1, -1)))
    torch.clamp(count[:, None] - depth, 0, m, out=state.paths[3])
    deepest = torch.where(arange(config.max_branches, device) < branches[:, None], depth + state.paths[3], 0)
    state.drafts.copy_(deepest.amax(1))
    if m > 1 and state.vocabulary.shift:
        state.chain_context.copy_(contexts(state))
    return branches


def choose_paths(state: State, records: Records, rank: Tensor, made: Tensor, count: Tensor) -> Tensor:
    """Choose the k paths of largest weight.

    A path ends with a choice for draft j: the second one, or the first where it goes on behind all drafts of another
    branch. Before that it may have another second choice, for draft i. So one table of i (or none) by j and choice has
    the weights of all paths.

    Args:
        state, records, rank, made: as of `spawn_tree`.
        count: ``[S]`` at most n.

    Returns:
        ``[S]`` branches to run, the anchor included.
    """
    config, slots, device = state.config, state.slots, rank.device
    m, length = config.drafts, min(config.max_edits, rank.shape[1])
    rank, position, token = rank[:, :length], made[0, :, :length], made[1, :, :length]
    second = records.second_token.gather(1, rank)
    first_log, second_log = (
        p.gather(1, rank).double().log().clamp(min=LEAST).nan_to_num(LEAST)
        for p in (records.probability, records.second_probability)
    )
    before = first_log.cumsum(1) - first_log
    last = torch.stack([before + first_log, before + second_log], 2).view(slots, 1, -1)  # [S, 1, 2 length]
    other = torch.cat([first_log.new_zeros(slots, 1), second_log - first_log], 1)  # [S, 1 + length]
    there = (arange(length, device) < count[:, None]).repeat_interleave(2, 1)
    weight = other[..., None] + last + table(m, length, device)  # [S, 1 + length, 2 length]
    weight = weight.masked_fill(~there[:, None], -torch.inf).flatten(1)
    best = weight.topk(min(config.branches, weight.shape[1]), dim=1)

    number = arange(length, device)
    earlier = best.indices // (2 * length) - 1  # [S, k'] draft i; -1 for none
    final = best.indices % (2 * length)
    j, takes_second = final // 2, final % 2
    is_second = (number == earlier[..., None]) | (number == j[..., None]) & (takes_second[..., None] == 1)
    on_path = number <= j[..., None]  # [S, k', length]
    tokens = torch.where(is_second, second[:, None], token[:, None])
    k = best.indices.shape[1]
    state.edits[0, :, 1:].fill_(-1)
    state.edits[0, :, 1 : k + 1, :length] = torch.where(on_path, position[:, None], -1)
    state.edits[1, :, 1 : k + 1, :length] = tokens

    # the parent verifies draft j: it goes on from i, or from the beginning, by as many times m drafts as fit
    begin = earlier + 1
    covers = begin + (j - begin) // m * m  # depth of the parent
    of_second = (covers == begin) & (earlier >= 0)
    row = torch.where(of_second, 0, begin)
    parent = torch.where(of_second, 2 * earlier + 1, row * 2 * length + 2 * (covers - 1))
    match = (parent[:, :, None] == best.indices[:, None]).long()  # [S, k', k'], at most one
    has_parent = covers > 0
    depth, of, last_token, _ = state.paths
    depth.zero_()
    depth[:, 1 : k + 1] = j + 1
    of[:, 1 : k + 1] = (match.argmax(2) + 1) * has_parent
    last_token[:, 1 : k + 1] = tokens.gather(2, j[..., None])[..., 0]
    return (best.values > -torch.inf).sum(1) + 1


@lru_cache(64)
def table(m: int, length: int, device: torch.device) -> Tensor:
    """Return what is added to the weights of paths: ``[1 + length, 2 length]``, i (or none) by j and choice.

    It is -inf where there is no such path, and else breaks ties.

    Args:
        m: drafts of a branch.
        length: of the deepest path.
        device: where it is wanted.
    """
    row, column = arange(1 + length, device)[:, None], arange(2 * length, device)
    j, choice = column // 2, column % 2  # 1: the second one
    is_path = (j >= row) & ((choice == 1) | ((j + 1 - row) % m == 0))
    order = column * (1 + length) + row
    return torch.where(is_path, -TIE * order.double(), -torch.inf)


def contexts(state: State) -> Tensor:
    """Return the token before each draft's position ``[S, K x m]``, from which a model with the shift predicts it.

    It is a token of the branch's path or of an earlier draft where one stands there, and else the sequence's. Behind
    the drafts, `chain` holds others; what is found for them is not used, but their rows run, so it has to be a token.
    """
    m, (position, token) = state.config.drafts, state.chain.view(2, state.slots, state.config.max_branches, -1)
    before, number = position - 1, arange(m, position.device)[:, None]
    written = state.canvas.gather(1, (before + state.origin).clamp_(min=0).flatten(1))
    if state.config.branches:
        place = torch.where(state.edit_position < 0, -2, state.edit_position)  # nowhere, so before nothing
        position, token = torch.cat([place, position], 2), torch.cat([state.edit_token, token], 2)
    length = position.shape[2]
    earlier = arange(length, position.device) < length - m + number
    drafted = (position[:, :, None] == before[..., None]) & earlier  # [S, K, m, length]
    found = (token[:, :, None] * drafted).amax(3).flatten(1)
    return torch.where(drafted.any(3).flatten(1), found, written)
