"""The step of a causal model: drafts are verified, and the text is the same as when written one token at a time.

The last verified token is *pending*: its K/V are not computed yet. It stands at position ``complete - 1``, and the
drafts d_1 .. d_m after it. In a causal model the row of each token predicts the next one from exactly the tokens
before it, so the rows of pending and of the drafts verify everything at once:

- d_i is accepted if all drafts before it are, and the row before it predicts d_i;
- the row of the last accepted token predicts one more token, which is verified, too, and is pending next.

Masks after the chain predict the drafts of the next step: each sees what is before it (I-DLM, arXiv 2604.11035), or
all masks of its group (linear self-speculation, arXiv 2607.05722). A group may follow every token at which the
chain may end (TiDAR, arXiv 2511.08923). If the chain ends at a token without a group, the next step has no drafts.

With `decode.branches` there are branches beside the chain (`paths`): each is a chain of its own, with second choices
for one or two of the drafts, and masks after it. The branch with the most accepted drafts wins.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lopa_dist.decode.config import DecodeConfig
from lopa_dist.decode.state import FAILED, HostState, Records, State, Window, arange, of_branch
from lopa_dist.decode.winner import Winner
from lopa_dist.decode.written import note
from lopa_dist.ragged import UNBOUNDED, Ints, ragged_arange
from lopa_dist.rows.causal_rows import CausalRows
from lopa_dist.rules.paths import best_paths
from lopa_dist.rules.rule import Rule
from lopa_dist.staging import to_device


def verify(state: State, records: Records) -> Winner:
    """Accept each branch's drafts as long as the row before each predicts it, and choose the branch with the most.

    Args:
        state: from which the forward was laid out.
        records: ``[S, K, D]``, what the rows of pending and of each branch's D - 1 drafts predict. `Records.drafts`
            ``[S, K, D, n]`` is what the n masks after each of these rows predict; without a mask, the token is -1.

    Returns:
        The verified tokens, up to the first end-of-text and the answer's limit. If a prediction is not a number, only
        the tokens before it are returned. The next step makes this prediction first, and fails the sequence, unless a
        stop string has ended the sequence before.
    """
    depth = arange(records.packed.shape[3], state.canvas.device)
    position = state.complete[:, None] + depth  # [S, D] which each row predicts
    drafts = chains(state)[..., : len(depth) - 1]
    broken = not_numbers(records)
    agrees = (records.token[..., :-1] == drafts) & (depth[:-1] < state.drafts[:, None, None])
    agrees = agrees > broken[..., :-1]  # and is not broken: one operation instead of two
    by_branch = agrees.cumprod(2).sum(2)  # [S, K]
    accepted, branch, accepted_with = by_branch[:, 0], torch.zeros_like(state.branches), None
    if state.config.branches:
        runs = arange(state.config.max_branches, depth.device) < state.branches[:, None]
        by_branch = torch.where(runs, by_branch, -1)
        accepted, branch = by_branch.max(1)  # the first of equals: the chain's K/V are in place
        accepted, accepted_with = accepted.clamp(min=0), by_branch.cummax(1).values
    assert records.drafts is not None
    records = Records(of_branch(records.packed, branch, 1), Records(of_branch(records.drafts.packed, branch, 1)))
    brought = (depth <= accepted[:, None]) & (position < state.limit[:, None]) & (state.done == 0)[:, None]
    broken = of_branch(broken, branch)
    broken[:, 0] = False  # a first prediction is brought even if it is not a number
    brought = brought > broken
    ended = None
    if state.config.stop_at_eos:
        ends = state.is_eos(records.token) & brought
        brought &= ends.cumsum(1) <= ends  # true up to the first end-of-text, this included: no other is before it
        ended = ends.any(1)
    position = torch.where(brought, position, -1)
    return Winner(
        branch, records, position, records.token.long(),
        accepted=accepted, accepted_with=accepted_with, probability=records.packed[1], ended=ended,
    )  # fmt: skip


def not_numbers(records: Records) -> Tensor:
    """Return where predictions are not numbers, in the shape of `records`."""
    total = records.probability + records.confidence
    return total != total  # NaN does not equal itself


def chains(state: State) -> Tensor:
    """Return the drafts of each branch, ``[S, K, m]`` tokens."""
    return state.chain_token.view(state.slots, state.config.max_branches, -1)


def advance(state: State, winner: Winner) -> None:
    """Write the verified tokens, and move the frontiers past them, in place.

    Predictions after the last verified token are written, too, because nothing reads what follows the frontier.
    """
    records, running = winner.records, state.done == 0
    brought = winner.position >= 0
    count = brought.sum(1)
    failed = not_numbers(Records(records.packed[:, :, 0])) & running
    position = state.complete[:, None] + arange(brought.shape[1], brought.device)
    state.answers.scatter_(1, position, winner.token)
    state.complete += count
    torch.where(running, state.complete - 1, state.committed, out=state.committed)
    state.end.copy_(state.complete)
    state.done |= state.complete >= state.limit
    if winner.ended is not None:
        state.done |= winner.ended
    state.done.masked_fill_(failed, FAILED)
    state.step += running
    assert winner.accepted is not None
    torch.minimum(winner.accepted, count, out=state.accepted)
    state.winner.copy_(winner.branch)
    note(state, winner)


def proposals(winner: Winner) -> Records:
    """Return what the masks after each chain's end predicted, ``[S, n]``; without a mask, the token is -1."""
    groups, accepted = winner.records.drafts, winner.accepted
    assert groups is not None
    assert accepted is not None
    return Records(groups.packed[:, arange(len(accepted), accepted.device), accepted])


def spawn(state: State, winner: Winner, window: Window | None) -> None:
    """Set the drafts of the next step to what the masks after the chain's end predicted.

    If drafts come from text and there are no branches, set none: the host drafts (`put_chains`). The anchor's drafts
    are also written into the canvas. Drafts from the answer's last position on are left out, and so are an end-of-text
    and all drafts after it: the row of the last draft before them predicts the answer's last token or the end-of-text.
    `window` is None: causal models have no windows.
    """
    config = state.config
    if config.drafts_text and not config.branches:
        state.drafts.zero_()
        state.expects_eos.zero_()
        state.branches.copy_(state.done == 0)
        return
    proposed = proposals(winner)
    n = proposed.packed.shape[2]
    token, usable = proposed.token.long(), proposed.token >= 0
    if config.stop_at_eos:
        ends = state.is_eos(token)
        state.expects_eos.copy_((ends & (usable.cumprod(1) > 0)).any(1))
        usable &= ~ends
    count = usable.cumprod(1).sum(1)
    most = (state.limit - 1 - state.complete).clamp(min=0)
    state.drafts.copy_(torch.minimum(count, most)).masked_fill_(state.done != 0, 0)
    number = arange(n, token.device)
    position = state.complete[:, None] + number
    drafted = torch.where(number < state.drafts[:, None], token, state.answers.gather(1, position))
    state.answers.scatter_(1, position, drafted)
    chain = chains(state)
    chain[:, :, :n] = token[:, None].clamp(min=0)
    branches = torch.ones_like(count)
    if config.branches:
        # each branch has all drafts, so none continues another
        paths = best_paths(proposed.probability, proposed.second_probability, state.drafts, config.branches, UNBOUNDED)
        of_paths = chain[:, 1 : 1 + paths.length.shape[1], :n]
        # where a path has no choice, its tokens are not used yet; but drafts from text may be more, and run there later
        second = proposed.second_token[:, None].long().clamp(min=0)
        of_paths.copy_(torch.where(paths.second, second, of_paths))
        branches += paths.chosen
    state.branches.copy_(branches).masked_fill_(state.done != 0, 0)


def put_chains(
    state: State,
    host: HostState,
    slots: Ints,
    counts: Ints,
    expects_eos: Ints,
    change: Ints,
    paths: Sequence[Sequence[Sequence[int]]],
) -> HostState:
    """Replace the drafts that `spawn` gave sequences, and return what the host knows afterwards; `host` is not changed.

    Args:
        state, host: of all slots, after the same step.
        slots: ``[n]`` of the sequences.
        counts: ``[n]`` how many drafts they have; none stands at or after the answer's last position.
        expects_eos: ``[n]`` 1 if an end-of-text is expected after them.
        change: what their chains change in `State.storage`, ``[2, c]`` (`engine.chain_change`).
        paths: for each sequence, more branches after those that it has, each with as many drafts as its chain; empty
            where no sequence gets any.
    """
    drafts, eos, branches = host.drafts.copy(), host.expects_eos.copy(), host.branches
    drafts[slots], eos[slots] = counts, expects_eos
    if paths:
        of, begin = np.array([len(some) for some in paths]), branches[slots]  # number of the first new branch
        branches = branches.copy()
        branches[slots] += of
        branch, lengths = begin.repeat(of) + ragged_arange(of), counts.repeat(of)
        (_, first, *_), (_, step, *_) = state.chain_places
        cell = (first + slots * step).repeat(of) + branch * state.config.max_drafts
        tokens = np.array([token for some in paths for path in some for token in path], np.int64)
        cells = np.append(cell.repeat(lengths) + ragged_arange(lengths), state.branches.storage_offset() + slots)
        change = np.concatenate([change, np.stack([cells, np.append(tokens, branches[slots])])], 1)
    assert state.storage is not None
    state.storage.index_copy_(0, *to_device(change, state.canvas.device).unbind())
    return host._replace(drafts=drafts, expects_eos=eos, branches=branches)


def in_words(config: DecodeConfig) -> str:
    """Return what a job says about this rule (`Rule.words`)."""
    branches = f"{config.branches} lookahead branches and " if config.branches else ""
    drafts = "as many drafts as are fastest" if config.drafts == "auto" else f"{config.drafts or 'no'} drafts"
    return f"{branches}{drafts}, context {config.context}"


CAUSAL = Rule("causal", verify, spawn, advance, CausalRows(), words=in_words, serves=lambda config: config.causal)
