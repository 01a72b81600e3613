"""Verified lookahead: drafts that the next forward confirms, and a tree of second choices (verify=agreement).

The most confident masked positions, with the tokens predicted there, are *drafts* d_1, d_2, ... The anchor verifies the
first m of them: a draft is accepted if all before it are and the forward, in their context, predicts its token.

Most chains of drafts fail before their end, and where one fails, the model most often predicts its second choice. So
the other branches are *paths*: choices for the first drafts, some of them second choices. A branch has the tokens of
its path filled, and verifies the next m drafts. For example with m = 2, drafts a to e and second choices A and B:

    branch      0      1      2      3      4
    path        -      A      a B    a b    A b c
    verifies    a b    b c    c d    c d    d e
    parent             0      0      0      1          the branch that verifies the last token of its path

Branches 3 and 4 go on where all drafts of their parents are accepted. `paths` says which paths there are, and which k
of them run.

Verification walks from the anchor. Where the drafts of a branch end, or one is rejected, the walk continues in the
branch whose path has the token that the model predicts there: above, in branch 2 if the anchor's rows predict a and,
after it, B. Without such a branch the walk ends: the model's own token is filled, and this branch wins. So every token
that the winner brings is the model's own choice in the context in which it is placed.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from lopa_dist.decode.config import DecodeConfig
from lopa_dist.decode.state import Records, State, Window, arange, of_branch
from lopa_dist.decode.winner import Winner
from lopa_dist.rows.draft_rows import VerifiedDrafts
from lopa_dist.rows.window_rows import WindowRows
from lopa_dist.rules.candidates import Candidates, candidates
from lopa_dist.rules.paths import best_paths
from lopa_dist.rules.rule import Rule


def most_candidates(config: DecodeConfig) -> int:
    """Return the most drafts that can be used: the length of the longest path, and m more."""
    return config.drafts + (config.max_edits if config.branches else 0)


def verify(state: State, records: Records) -> Winner:
    """Return as the winner the branch where verification, walking from the anchor, ends.

    Args:
        state: from which the forward was laid out.
        records: ``[S, K, W]``; `Records.drafts` ``[S, K x m]`` is what the forward predicts at each branch's drafts.
    """
    config = state.config
    assert records.drafts is not None
    m = config.drafts
    by_draft = (state.slots, config.max_branches, m)
    position, draft = state.chain[:2].view(2, *by_draft)
    predicted, probability = records.drafts.token.view(by_draft), records.drafts.probability.view(by_draft)
    number, depth = arange(m, draft.device), state.path_depth
    # a draft whose rows overflow is rejected: its probability is NaN, which does not equal itself
    valid = (number < state.path_drafts[..., None]) & (probability == probability)
    accepted = ((predicted == draft) & valid).cumprod(2).sum(2)  # [S, K]

    branch, accepted_with = torch.zeros_like(state.branches), None
    if config.branches:
        reached = on_walk(state, predicted, accepted)
        branch = torch.where(reached, depth, -1).argmax(1)  # the branches that are reached lie on one path
        accepted_with = torch.where(reached, depth + accepted, 0).cummax(1).values

    # the winner brings its accepted drafts, and what is predicted in place of the next one
    accepted, brought = of_branch(accepted, branch), of_branch(probability, branch)
    token = torch.where(number < accepted[:, None], of_branch(draft, branch), of_branch(predicted, branch))
    proved = (number <= accepted[:, None]) & of_branch(valid, branch)
    position = torch.where(proved, of_branch(position, branch), -1)
    if config.branches:  # and before these the tokens of its path
        path_position, path_token = of_branch(state.edits, branch, 1)
        position, token = torch.cat([path_position, position], 1), torch.cat([path_token, token], 1)
        accepted = accepted + of_branch(depth, branch)
        if state.written is not None:
            brought = torch.cat([path_probability(state, probability, branch), brought], 1)
    return Winner(
        branch, Records(of_branch(records.packed, branch, 1)), position, token,
        accepted=accepted, accepted_with=accepted_with, probability=brought.view(torch.int32),
    )  # fmt: skip


def on_walk(state: State, predicted: Tensor, accepted: Tensor) -> Tensor:
    """Return which branches the walk from the anchor reaches, ``[S, K]`` bool; it ends at the deepest one.

    It reaches a branch if it reaches the parent, if the parent accepts every draft before the place of the path's last
    token, and if the parent predicts that token there.

    Args:
        state: from which the forward was laid out.
        predicted: ``[S, K, m]`` tokens at each branch's drafts.
        accepted: ``[S, K]`` of each branch's drafts, if the walk reaches it.
    """
    _, branches, m = predicted.shape
    depth, parent = state.path_depth, state.path_parent
    last = (depth - 1 - depth.gather(1, parent)).clamp(min=0)  # number of that draft in the parent
    agrees = predicted.flatten(1).gather(1, parent * m + last) == state.path_token
    from_parent = agrees & (accepted.gather(1, parent) >= last)
    number = arange(branches, depth.device)
    reached = from_parent & (number < state.branches[:, None]) | (number == 0)
    # a branch is reached if all branches on its way up to the anchor are; each round looks twice as far up
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


def spawn(state: State, winner: Winner, window: Window | None) -> None:
    """Choose the paths of the next forward, and the drafts that each verifies.

    Args:
        state: after `advance`; gets the branches' paths, edits and drafts.
        winner: of this step.
        window: from `advance`.
    """
    assert window is not None
    config, end = state.config, None
    if config.drafts > 1 and config.scope.by_blocks:
        # drafts see one another, so all are in one block: the first that has masks (`draft_rows`)
        end = state.complete + config.block_size
    found = candidates(state, winner, window, most_candidates(config), end)
    slots, n = found.column.shape
    device = found.column.device
    m = config.drafts
    running = state.done == 0
    count = found.total.clamp(max=n) * running
    branches = choose_paths(state, winner.records, found, count) if config.branches else 1
    depth = state.path_depth

    # Every branch has rows for the same number of drafts. If fewer are left, drafts of its own path fill the gap: with
    # m = 4, 5 candidates and a path of 3, it has the drafts of the candidates 3, 4, 0 and 1.
    number = arange(m, device)
    order = (depth[..., None] + number).view(slots, -1) % count.clamp(min=1)[:, None]  # [S, K x m]
    torch.gather(found.placed, 2, order.expand(2, -1, -1), out=state.chain[:2])
    torch.clamp(count[:, None] - depth, 0, m, out=state.path_drafts)
    torch.mul(running, branches, out=state.branches)
    runs = arange(config.max_branches, device) < state.branches[:, None]
    torch.amax((depth + state.path_drafts) * runs, 1, out=state.drafts)
    if m > 1 and state.vocabulary.shift:
        write_verifying_tokens(state)


def choose_paths(state: State, records: Records, found: Candidates, count: Tensor) -> Tensor:
    """Choose the paths of the next forward.

    Args:
        state: gets the branches' paths and edits.
        records: ``[S, W]`` of the winner.
        found: the candidates.
        count: ``[S]`` how many of them there are, at most n.

    Returns:
        ``[S]`` branches to run, the anchor included.
    """
    config, n = state.config, min(state.config.max_edits, found.column.shape[1])
    column, (position, token) = (
        found.column[:, :n],
        found.placed[:, :, :n],
    )  # for which a path may choose
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


def write_verifying_tokens(state: State) -> None:
    """Set the token before each draft's position, from which a model with the shift predicts it.

    If a token of the branch's path or an earlier draft stands there, it is that token, otherwise the sequence's. For
    example, if a branch has the path 7: A (token A at position 7) and the drafts 6: b, 8: c and 9: d, these are the
    sequence's token at 5 for b, A for c, and c for d.

    `chain` has further entries after the drafts. Their results are not used, but their rows run, so each must be a
    token.
    """
    m, (position, token) = state.config.drafts, state.chain[:2].view(2, state.slots, state.config.max_branches, -1)
    before = position - 1  # [S, K, m]
    of_sequence = state.canvas.gather(1, (before + state.origin).clamp_(min=0).flatten(1))
    # what a branch fills: the E tokens of its path, then its m drafts; before draft i come the first E + i of them
    if state.config.branches:
        # no edit: -2, which is the position before no draft
        edited = state.edit_position.masked_fill(state.edit_position < 0, -2)
        position, token = torch.cat([edited, position], 2), torch.cat([state.edit_token, token], 2)  # [S, K, E + m]
    total = position.shape[2]
    earlier = earlier_drafts(m, total, position.device)
    found = (position[:, :, None] == before[..., None]) & earlier  # [S, K, m, E + m], at most one of E + m
    filled = (token[:, :, None] * found).amax(3).flatten(1)
    torch.where(found.any(3).flatten(1), filled, of_sequence, out=state.chain_verifying)


@lru_cache
def earlier_drafts(m: int, total: int, device: torch.device) -> Tensor:
    """Return which of `total` tokens, the last m of which are drafts, come before each draft, ``[m, total]`` bool."""
    return torch.ones(m, total, dtype=torch.bool, device=device).tril(total - m - 1)


VERIFIED = Rule(
    "verified",
    verify,
    spawn,
    rows=WindowRows((VerifiedDrafts(),)),
    serves=lambda config: not config.causal and config.verify == "agreement" and config.drafts > 0,
)
