"""Verified lookahead: a tree of drafts (verify=agreement).

The most confident masked positions, with the tokens predicted there, are *drafts* d_1, d_2, ... The anchor verifies the
first m of them: a draft is accepted if all before it are and the forward, in their context, predicts its token.

Most chains of drafts fail before their end, and where one fails the model most often predicts its second choice. So the
other branches are *paths*: choices for the first drafts, some of them second choices. A branch has the tokens of its
path filled, and verifies the m drafts behind it. For example with m = 2, drafts a to e and second choices A and B:

    branch      0      1      2      3      4
    path        -      A      a B    a b    A b c
    verifies    a b    b c    c d    c d    d e
    parent             0      0      0      1          the branch that verifies the last token of its path

Branches 3 and 4 go on where all drafts of their parents are accepted. `all_paths` lists which paths there are. The
weight of a path is the probability that verification comes this way (`chances`), and the k paths of largest weight run.

Verification walks from the anchor. Where the drafts of a branch end, or one is rejected, the walk continues in the
branch whose path has the token that the model predicts there: above, in branch 2 if the anchor's rows predict a and,
after it, B. Without such a branch the walk ends: the model's own token is filled, and this branch wins. So every token
that the winner brings is the model's own choice in the context in which it is placed.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lopa_dist.decode.config import DecodeConfig
from lopa_dist.decode.state import Records, State, arange
from lopa_dist.decode.winner import Winner, anchor_alone

LEAST = -1e3  # of the logarithm of a probability, so that sums and differences of them are numbers
ACCEPTED, SECOND = 0.3, 0.5  # exponents of `chances`
ANCHOR = -1  # the number of no path, in `AllPaths`
TIE = 1e-9  # of log weights: nearly equal paths come in the order of `all_paths`


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
    assert records.drafts is not None
    m, slot = config.drafts, arange(state.slots, state.canvas.device)
    by_draft = (state.slots, config.max_branches, m)
    position, draft = state.chain[:2].view(2, *by_draft)
    predicted, probability = records.drafts.token.view(by_draft), records.drafts.probability.view(by_draft)
    number, depth = arange(m, slot.device), state.path_depth
    # a draft whose rows overflow, so that its probability is NaN, is rejected
    valid = (number < state.path_drafts[..., None]) & ~probability.isnan()
    accepted = ((predicted == draft) & valid).cumprod(2).sum(2)  # [S, K]

    branch, accepted_with = torch.zeros_like(slot), None
    if config.branches:
        reached = on_walk(state, predicted, accepted)
        branch = torch.where(reached, depth, -1).argmax(1)  # what is reached lies on one path
        accepted_with = torch.where(reached, depth + accepted, 0).cummax(1).values

    # the winner brings its accepted drafts, and what is predicted in place of the next one
    of_winner = slot, branch
    accepted, valid, brought = accepted[of_winner], valid[of_winner], probability[of_winner]
    token = torch.where(number < accepted[:, None], draft[of_winner], predicted[of_winner])
    position = torch.where((number <= accepted[:, None]) & valid, position[of_winner], -1)
    if config.branches:  # and before these its path
        path_position, path_token = state.edits[:, slot, branch]
        position, token = torch.cat([path_position, position], 1), torch.cat([path_token, token], 1)
        accepted = accepted + depth[of_winner]
        if state.written is not None:
            brought = torch.cat([path_probability(state, probability, branch), brought], 1)
    return Winner(
        branch, Records(records.packed[:, slot, branch]), position, token,
        accepted=accepted, accepted_with=accepted_with, probability=brought.view(torch.int32),
    )  # fmt: skip


def on_walk(state: State, predicted: Tensor, accepted: Tensor) -> Tensor:
    """Return which branches the walk from the anchor comes to, ``[S, K]`` bool; it ends at the deepest one.

    It comes to a branch if it comes to the branch's parent, and the parent accepts all drafts before the one in whose
    place the path has its last token, and predicts this token there.

    Args:
        state: from which the forward was laid out.
        predicted: ``[S, K, m]`` tokens at each branch's drafts.
        accepted: ``[S, K]`` of each branch's drafts, if the walk comes to it.
    """
    _, branches, m = predicted.shape
    depth, parent = state.path_depth, state.path_parent
    last = (depth - 1 - depth.gather(1, parent)).clamp(min=0)  # number of that draft in the parent
    agrees = predicted.flatten(1).gather(1, parent * m + last) == state.path_token
    from_parent = agrees & (accepted.gather(1, parent) >= last)
    number = arange(branches, depth.device)
    reached = from_parent & (number < state.branches[:, None]) | (number == 0)
    # each round looks twice as far up: is the parent reached, from there the parent's parent, and so on to the anchor
    for _ in range((branches - 1).bit_length()):
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

    # Every branch has rows for the same number of drafts. If fewer are left, drafts of its own path fill the gap: with
    # m = 4, 5 candidates and a path of 3, it has the drafts of the candidates 3, 4, 0 and 1.
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
    config, n = state.config, min(state.config.max_edits, column.shape[1])
    column, (position, token) = column[:, :n], candidates[:, :, :n]  # of the candidates for which a path may choose
    probability, second_probability, second_token = (
        x.gather(1, column) for x in (records.probability, records.second_probability, records.second_token)
    )
    paths = best_paths(probability, second_probability, count, config.branches, config.drafts)
    tokens = torch.where(paths.second, second_token[:, None], token[:, None])  # [S, k', n]
    length, branches = paths.length[..., None], slice(1, 1 + paths.length.shape[1])
    state.edits[0, :, 1:].fill_(-1)
    state.edits[0, :, branches, :n] = torch.where(arange(n, column.device) < length, position[:, None], -1)
    state.edits[1, :, branches, :n] = tokens

    state.path_depth.zero_()
    state.path_depth[:, branches] = paths.length
    state.path_parent[:, branches] = paths.parent
    state.path_token[:, branches] = tokens.gather(2, length - 1)[..., 0]
    return paths.chosen + 1


class Paths(NamedTuple):
    """The k' paths of largest weight of each sequence, which branches 1 to k' take; k' < k if there are few drafts."""

    chosen: Tensor  # [S] how many of them there are
    length: Tensor  # [S, k'] drafts for which a path makes a choice
    second: Tensor  # [S, k', n] bool: drafts for which it takes the second choice
    parent: Tensor  # [S, k'] the branch that verifies its last choice


def best_paths(first: Tensor, second: Tensor, count: Tensor, k: int, m: int) -> Paths:
    """Choose the paths of largest weight, which is the product of the chances of their choices.

    Args:
        first, second: ``[S, n]`` probabilities of the drafts' first and second choices.
        count: ``[S]`` how many drafts there are.
        k: paths wanted.
        m: drafts that a branch verifies.
    """
    n = first.shape[1]
    paths = all_paths(n, m, first.device)
    log_chances = torch.stack(chances(first.double(), second.double()), 2)  # [S, n, 2] by draft and choice
    log_chances = log_chances.log().clamp(min=LEAST).nan_to_num(LEAST)
    log_first, log_second = log_chances.unbind(2)
    exists = arange(n, first.device) < count[:, None]
    # first choices for all drafts before one, and either choice for it; then what one earlier second choice changes
    before = torch.where(exists, log_first.cumsum(1) - log_first, -torch.inf)  # [S, n]
    up_to = (before[..., None] + log_chances).flatten(1)  # [S, 2 n]
    change = F.pad(log_second - log_first, (1, 0))  # [S, 1 + n] beginning with no change
    weight = change[:, paths.earlier] + up_to[:, paths.end] + paths.tie  # [S, P]
    best = weight.topk(min(k, weight.shape[1]), dim=1)

    path = best.indices  # [S, k']
    of_branch = F.pad(path, (1, 0), value=ANCHOR)  # [S, 1 + k']
    # a path's parent weighs more, so it is one of them
    parent = (paths.parent[path][:, :, None] == of_branch[:, None]).long().argmax(2)
    return Paths((best.values > -torch.inf).sum(1), paths.length[path], paths.second[path], parent)


class AllPaths(NamedTuple):
    """All paths for n drafts, numbered in the order in which the first of equals is taken. P is how many there are."""

    length: Tensor  # [P] drafts for which a path makes a choice
    second: Tensor  # [P, n] bool: drafts for which it takes the second choice
    parent: Tensor  # [P] number of the path whose branch verifies its last choice, or `ANCHOR`
    # of what its weight consists
    end: Tensor  # [P] 2 j for the first choice of its last draft j, 2 j + 1 for the second one
    earlier: Tensor  # [P] i + 1 if it takes the second choice for a draft i before that; 0: it takes none
    tie: Tensor  # [P] a tiny amount, smaller from path to path


@lru_cache(64)
def all_paths(n: int, m: int, device: torch.device) -> AllPaths:
    """List the paths for n drafts.

    A path consists of first choices, with at most one second choice among them, up to its last choice. This is a second
    one; or a first one, if m, 2 m, 3 m ... first choices stand at the end: then the path goes on where all drafts of
    another branch are accepted. Its parent is the longest path with which it begins, or the anchor.

    For n = 3 and m = 2, with 2 for a second choice: 2, 11, 12 and 22; then 211, 112, 212 and 122. The parent of 22, 211
    and 212 is 2, that of 112 is 11, that of 122 is 12, and that of 2, 11 and 12 is the anchor.

    Args:
        n: drafts for which a path may choose.
        m: drafts that a branch verifies.
        device: of the result.
    """
    paths = [  # for each draft, whether the path takes the second choice
        (*(draft == earlier for draft in range(length - 1)), last)
        for length in range(1, n + 1)
        for last in (False, True)
        for earlier in range(-1, length - 1)  # -1: none
        if last or (length - 1 - earlier) % m == 0
    ]
    number = {path: p for p, path in enumerate(paths)}
    number[()] = ANCHOR
    lengths = [len(path) for path in paths]
    parents = [
        next(number[path[:i]] for i in reversed(range(length)) if path[:i] in number)
        for path, length in zip(paths, lengths, strict=True)
    ]
    tensor = partial(torch.tensor, device=device)
    end = tensor([2 * (length - 1) + path[-1] for path, length in zip(paths, lengths, strict=True)])
    earlier_second = tensor([path.index(True) + 1 if any(path[:-1]) else 0 for path in paths])
    return AllPaths(
        length=tensor(lengths),
        second=tensor([path + (False,) * (n - len(path)) for path in paths]),
        parent=tensor(parents),
        end=end,
        earlier=earlier_second,
        tie=-TIE * (end * (1 + n) + earlier_second).double(),
    )


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


def verifying_tokens(state: State) -> Tensor:
    """Return the token before each draft's position ``[S, K x m]``, from which a model with the shift predicts it.

    If a token of the branch's path or an earlier draft stands there, it is that token, otherwise the sequence's. For
    example, if a branch has the path 7: A (token A at position 7) and the drafts 6: b, 8: c and 9: d, these are the
    sequence's token at 5 for b, A for c, and c for d.

    `chain` has further entries behind the drafts. Their results are not used, but their rows run, so each must be a
    token.
    """
    m, (position, token) = state.config.drafts, state.chain[:2].view(2, state.slots, state.config.max_branches, -1)
    before, number = position - 1, arange(m, position.device)[:, None]  # [S, K, m], [m, 1]
    of_sequence = state.canvas.gather(1, (before + state.origin).clamp_(min=0).flatten(1))
    # what a branch fills: the E tokens of its path, then its m drafts; before draft i come the first E + i of them
    if state.config.branches:
        # no edit: -2, which is the position before no draft
        edited = state.edit_position.masked_fill(state.edit_position < 0, -2)
        position, token = torch.cat([edited, position], 2), torch.cat([state.edit_token, token], 2)  # [S, K, E + m]
    total = position.shape[2]
    earlier = arange(total, position.device) < total - m + number  # [m, E + m]
    found = (position[:, :, None] == before[..., None]) & earlier  # [S, K, m, E + m], at most one of E + m
    of_branch = (token[:, :, None] * found).amax(3).flatten(1)
    return torch.where(found.any(3).flatten(1), of_branch, of_sequence)
