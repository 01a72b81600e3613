"""Verified lookahead: a tree of drafts (verify=agreement).

The most confident masked positions, with the tokens predicted there, are *drafts* d_1, d_2, ... The anchor verifies the
first m of them: a draft is accepted if all before it are and the forward, in their context, predicts its token.

Most chains of drafts fail before their end, and where one fails the model most often predicts its second choice. So the
other branches are *paths*: choices for the first drafts, some of them second choices. A branch has the tokens of its
path filled, and verifies the m drafts behind it. Its weight is the probability that verification comes this way
(`chances`); the k paths of largest weight run. A path has up to two second choices. It may also continue another branch
whose m drafts are all accepted.

Verification walks from the anchor. Where the drafts of a branch end, or one is rejected, the walk continues in the
branch whose path has the token that the model predicts there. Without such a branch the walk ends: the model's own
token is filled, and this branch wins. So every token that the winner brings is the model's own choice in the context in
which it is placed.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lopa_dist.decode.config import DecodeConfig
from lopa_dist.decode.state import Records, State, arange
from lopa_dist.decode.winner import Winner, anchor_alone

LEAST = -1e3  # of the logarithm of a probability, so that sums and differences of them are numbers
ACCEPTED, SECOND = 0.3, 0.5  # exponents of `chances`
TIE = 1e-9  # of log weights: among nearly equal paths the shorter one comes first, then the one with first choices


def most_candidates(config: DecodeConfig) -> int:
    """Return the most drafts that can be used: the length of the deepest path, and m more."""
    return config.drafts + (config.max_edits if config.branches else 0)


def by_agreement(state: State, records: Records) -> Winner:
    """Walk from the anchor to the branch where verification ends, which wins.

    Args:
        state: from which the forward was laid out.
        records: ``[S, K, W]``; `Records.drafts` ``[S, K x m]`` is what the forward predicts at each branch's drafts.
    """
    config = state.config
    if not config.drafts:
        return anchor_alone(state, records)
    slots, branches, m = state.slots, config.max_branches, config.drafts
    number = arange(m, state.canvas.device)
    assert records.drafts is not None
    position, draft, predicted, probability = (
        x.view(slots, branches, m) for x in (*state.chain[:2], records.drafts.token, records.drafts.probability)
    )
    depth = state.path_depth
    # a draft whose rows overflow, so that its probability is NaN, is rejected
    valid = (number < state.path_drafts[..., None]) & ~probability.isnan()
    accepted = ((predicted == draft) & valid).cumprod(2).sum(2)  # [S, K]
    branch, accepted_with = depth.new_zeros(slots), None
    if config.branches:
        reached = on_walk(state, predicted, accepted)
        branch = torch.where(reached, depth, -1).argmax(1)  # what is reached lies on one path
        accepted_with = torch.where(reached, depth + accepted, 0).cummax(1).values

    slot = arange(slots, branch.device)
    accepted, valid = accepted[slot, branch], valid[slot, branch]
    token = torch.where(number < accepted[:, None], draft[slot, branch], predicted[slot, branch])
    position = torch.where((number <= accepted[:, None]) & valid, position[slot, branch], -1)
    brought = probability[slot, branch]
    if config.branches:
        path_position, path_token = state.edits[:, slot, branch]
        position, token = torch.cat([path_position, position], 1), torch.cat([path_token, token], 1)
        if state.written is not None:
            brought = torch.cat([path_probability(state, probability, branch), brought], 1)
        accepted = accepted + depth[slot, branch]
    return Winner(
        branch, Records(records.packed[:, slot, branch]), position, token,
        accepted=accepted, accepted_with=accepted_with, probability=brought.view(torch.int32),
    )  # fmt: skip


def on_walk(state: State, predicted: Tensor, accepted: Tensor) -> Tensor:
    """Return which branches the walk from the anchor comes to, ``[S, K]`` bool; it ends at the deepest one.

    Args:
        state: from which the forward was laid out.
        predicted: ``[S, K, m]`` tokens at each branch's drafts.
        accepted: ``[S, K]`` of each branch's drafts, if the walk comes to it.
    """
    _, branches, m = predicted.shape
    depth, parent = state.path_depth, state.path_parent
    # the parent's draft in whose place the path has its last token
    draft = (depth - 1 - depth.gather(1, parent)).clamp(min=0)
    agrees = predicted.flatten(1).gather(1, parent * m + draft) == state.path_token
    number = arange(branches, depth.device)
    reached = agrees & (accepted.gather(1, parent) >= draft) & (number < state.branches[:, None]) | (number == 0)
    for _ in range((branches - 1).bit_length()):  # is its parent reached, the parent's parent, and so on to the anchor
        reached = reached & reached.gather(1, parent)
        parent = parent.gather(1, parent)
    return reached


def path_probability(state: State, probability: Tensor, branch: Tensor) -> Tensor:
    """Return the probabilities with which verification predicted the tokens of a branch's path, ``[S, E]``.

    Args:
        state: from which the forward was laid out.
        probability: ``[S, K, m]`` of what was predicted at each branch's drafts.
        branch: ``[S]``.
    """
    slot, number = arange(state.slots, branch.device), arange(state.config.max_edits, branch.device)
    depth, m = state.path_depth, probability.shape[2]
    path = probability.new_zeros(state.slots, len(number))
    for _ in range(state.config.branches):  # from a branch to the one that verified the end of its path
        parent = state.path_parent[slot, branch]
        begin, end = depth[slot, parent, None], depth[slot, branch, None]
        verified = probability[slot, parent].gather(1, (number - begin).clamp(0, m - 1))
        path = torch.where((number >= begin) & (number < end), verified, path)
        branch = parent
    return path


def spawn_tree(state: State, records: Records, column: Tensor, candidates: Tensor, count: Tensor) -> Tensor:
    """Choose the paths of the next forward, and the drafts that each verifies.

    Args:
        state: gets the branches' paths, edits and drafts.
        records: ``[S, W]`` of the winner.
        column: ``[S, n]`` of the candidates in `records`, the most confident first.
        candidates: ``[2, S, n]`` their positions and tokens.
        count: ``[S]`` how many candidates there are.

    Returns:
        ``[S]`` branches to run, the anchor included.
    """
    config, (slots, n), device = state.config, column.shape, column.device
    m = config.drafts
    count = count.clamp(max=n).masked_fill(state.done != 0, 0)
    branches = torch.ones_like(count)
    depth = state.path_depth
    if config.branches:
        branches = choose_paths(state, records, column, candidates, count)

    # every branch has rows for the same number of drafts: if fewer are left, drafts of its own path fill the gap
    number = arange(m, device)
    order = (depth[..., None] + number).view(slots, -1) % count.clamp(min=1)[:, None]  # [S, K x m]
    state.chain[:2] = candidates.gather(2, order.expand(2, -1, -1))
    torch.clamp(count[:, None] - depth, 0, m, out=state.path_drafts)
    deepest = torch.where(arange(config.max_branches, device) < branches[:, None], depth + state.path_drafts, 0)
    state.drafts.copy_(deepest.amax(1))
    if m > 1 and state.vocabulary.shift:
        state.chain_verifying.copy_(verifying_tokens(state))
    return branches


def choose_paths(state: State, records: Records, column: Tensor, candidates: Tensor, count: Tensor) -> Tensor:
    """Choose the paths of the next forward.

    Args:
        state: gets the branches' paths and edits.
        records, column, candidates: as of `spawn_tree`.
        count: ``[S]`` candidates, at most n.

    Returns:
        ``[S]`` branches to run, the anchor included.
    """
    config, m, length = state.config, state.config.drafts, min(state.config.max_edits, column.shape[1])
    column, position, token = column[:, :length], candidates[0, :, :length], candidates[1, :, :length]
    probability, second_probability = (p.gather(1, column) for p in (records.probability, records.second_probability))
    paths = best_paths(probability, second_probability, count, config.branches, m)
    second = records.second_token.gather(1, column)
    tokens = torch.where(paths.second, second[:, None], token[:, None])
    k, last = paths.last.shape[1], paths.last[..., None]
    state.edits[0, :, 1:].fill_(-1)
    state.edits[0, :, 1 : k + 1, :length] = torch.where(arange(length, column.device) <= last, position[:, None], -1)
    state.edits[1, :, 1 : k + 1, :length] = tokens

    state.path_depth.zero_()
    state.path_depth[:, 1 : k + 1] = paths.last + 1
    state.path_parent[:, 1 : k + 1] = branches_before(paths, m, length)
    state.path_token[:, 1 : k + 1] = tokens.gather(2, last)[..., 0]
    return paths.chosen + 1


class Paths(NamedTuple):
    """The k' paths of largest weight, of each sequence; k' is k, or less if there are few drafts."""

    chosen: Tensor  # [S] how many there are
    number: Tensor  # [S, k'] cell in the table of all paths (`best_paths`)
    earlier: Tensor  # [S, k'] draft for which a path takes the second choice before its end; -1: none
    last: Tensor  # [S, k'] draft for which it makes its last choice
    second: Tensor  # [S, k', n] bool: drafts for which it takes the second choice


def best_paths(first: Tensor, second: Tensor, count: Tensor, k: int, m: int) -> Paths:
    """Choose the paths of largest weight.

    A path ends with a choice for draft j: the second one, or the first where it goes on behind all m drafts of another
    branch. Before that it may have another second choice, for draft i. So one table holds the weights of all paths: row
    0 is for paths without such an i, row i + 1 for draft i; column 2 j is for the first choice at j, 2 j + 1 for the
    second.

    Args:
        first, second: ``[S, n]`` probabilities of the drafts' first and second choices.
        count: ``[S]`` how many drafts there are.
        k: paths wanted.
        m: drafts that a branch verifies.
    """
    slots, n = first.shape
    log_chances = torch.stack(chances(first.double(), second.double()), 2)  # [S, n, 2] by draft and choice
    log_chances = log_chances.log().clamp(min=LEAST).nan_to_num(LEAST)
    log_first, log_second = log_chances.unbind(2)
    number = arange(n, first.device)
    before = torch.where(number < count[:, None], log_first.cumsum(1) - log_first, -torch.inf)  # of the drafts before j
    final = (before[..., None] + log_chances).view(slots, 1, -1)  # [S, 1, 2 n]
    earlier_second = F.pad(log_second - log_first, (1, 0))  # [S, 1 + n] what it adds
    weight = earlier_second[..., None] + final + bias_of_paths(m, n, first.device)
    best = weight.flatten(1).topk(min(k, weight[0].numel()), dim=1)
    earlier, column = best.indices // (2 * n) - 1, best.indices % (2 * n)
    last = column // 2
    takes_second = (number == earlier[..., None]) | (number == last[..., None]) & (column % 2 == 1)[..., None]
    return Paths((best.values > -torch.inf).sum(1), best.indices, earlier, last, takes_second)


def chances(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return the probabilities that verification predicts a draft's first choice, and that it predicts the second one.

    Both exceed the model's own probabilities, the smaller ones by more, because verification sees the drafts before,
    which were confirmed. The exponents were measured (docs/branches.md).

    Args:
        first, second: probabilities of the choices, where they were predicted.
    """
    accepted = first**ACCEPTED
    of_the_rest = (second / (1 - first).clamp(min=TIE)).clamp(0, 1)
    return accepted, (1 - accepted) * of_the_rest**SECOND


def branches_before(paths: Paths, m: int, n: int) -> Tensor:
    """Return the branch that verifies each path's last draft, ``[S, k']``; 0: the anchor.

    That branch's path is the beginning of this one: what ends with draft i, or nothing, and then as many runs of m
    first choices as fit before the last draft. It is looked up by its cell in the table of `best_paths`.

    Args:
        paths: from `best_paths`.
        m: drafts that a branch verifies.
        n: drafts that `best_paths` had.
    """
    begin = paths.earlier + 1
    depth = begin + (paths.last - begin) // m * m  # of that branch's path
    of_second = (depth == begin) & (paths.earlier >= 0)  # it ends with the second choice for draft i
    wanted = torch.where(of_second, 2 * paths.earlier + 1, begin * 2 * n + 2 * (depth - 1))
    match = (wanted[:, :, None] == paths.number[:, None]).long()  # [S, k', k'], at most one
    return (match.argmax(2) + 1) * (depth > 0)


@lru_cache(64)
def bias_of_paths(m: int, length: int, device: torch.device) -> Tensor:
    """Return what is added to the weights of paths: ``[1 + length, 2 length]``, the table of `best_paths`.

    Combinations that are not a path get -inf. The others get a tiny amount that breaks ties.

    Args:
        m: drafts of a branch.
        length: of the deepest path.
        device: of the result.
    """
    row, column = arange(1 + length, device)[:, None], arange(2 * length, device)
    j, choice = column // 2, column % 2  # 1: the second one
    is_path = (j >= row) & ((choice == 1) | ((j + 1 - row) % m == 0))
    order = column * (1 + length) + row
    return torch.where(is_path, -TIE * order.double(), -torch.inf)


def verifying_tokens(state: State) -> Tensor:
    """Return the token before each draft's position ``[S, K x m]``, from which a model with the shift predicts it.

    If a token of the branch's path or an earlier draft stands there, it is that token, otherwise the sequence's.
    `chain` has further entries behind the drafts. Their results are not used, but their rows run, so each must be a
    token.
    """
    m, (position, token) = state.config.drafts, state.chain[:2].view(2, state.slots, state.config.max_branches, -1)
    before, number = position - 1, arange(m, position.device)[:, None]
    written = state.canvas.gather(1, (before + state.origin).clamp_(min=0).flatten(1))
    if state.config.branches:
        # no edit: -2, which is the position before no draft
        edited = state.edit_position.masked_fill(state.edit_position < 0, -2)
        position, token = torch.cat([edited, position], 2), torch.cat([state.edit_token, token], 2)
    length = position.shape[2]
    earlier = arange(length, position.device) < length - m + number
    drafted = (position[:, :, None] == before[..., None]) & earlier  # [S, K, m, length]
    earlier_token = (token[:, :, None] * drafted).amax(3).flatten(1)
    return torch.where(drafted.any(3).flatten(1), earlier_token, written)
