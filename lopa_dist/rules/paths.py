"""Paths beside a chain of drafts, made of first and second choices. Those of largest weight run as branches.

The weight of a path is the probability that verification comes this way (`chances`).
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lopa_dist.decode.state import arange

LEAST = -1e3  # of the logarithm of a probability, so that sums and differences of them are numbers
ACCEPTED, SECOND = 0.3, 0.5  # exponents of `chances`
ANCHOR = -1  # stands for the anchor among the numbers of paths, in `AllPaths`
TIE = 1e-9  # of log weights: nearly equal paths come in the order of `all_paths`


class Paths(NamedTuple):
    """The k' paths of largest weight of each sequence, which branches 1 to k' take; k' < k if there are few drafts."""

    chosen: Tensor  # [S] how many of them there are
    length: Tensor  # [S, k'] drafts for which a path makes a choice
    second: Tensor  # [S, k', n] bool: drafts for which it takes the second choice
    parent: Tensor  # [S, k'] the branch that verifies its last choice


def best_paths(first: Tensor, second: Tensor, count: Tensor, k: int, m: int) -> Paths:
    """Return the paths of largest weight; a path's weight is the product of the chances of its choices.

    Args:
        first, second: ``[S, n]`` probabilities of the drafts' first and second choices.
        count: ``[S]`` how many drafts there are.
        k: how many paths are wanted.
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
    # a path's parent weighs more than the path, so it was chosen, too
    parent = (paths.parent[path][:, :, None] == of_branch[:, None]).long().argmax(2)
    return Paths((best.values > -torch.inf).sum(1), paths.length[path], paths.second[path], parent)


class AllPaths(NamedTuple):
    """All P paths for n drafts. Of paths with nearly equal weights, the one with the lowest number is taken."""

    length: Tensor  # [P] drafts for which a path makes a choice
    second: Tensor  # [P, n] bool: drafts for which it takes the second choice
    parent: Tensor  # [P] number of the path whose branch verifies its last choice, or `ANCHOR`
    # what its weight consists of
    end: Tensor  # [P] 2 j for the first choice of its last draft j, 2 j + 1 for the second one
    earlier: Tensor  # [P] i + 1 if it takes the second choice for a draft i before that; 0: it takes none
    tie: Tensor  # [P] a tiny amount, smaller from path to path


@lru_cache(64)
def all_paths(n: int, m: int, device: torch.device) -> AllPaths:
    """Return all paths for n drafts.

    A path consists of first choices, with at most one second choice among them, and a last choice. The last choice is a
    second one; or a first one, if exactly m, 2 m, 3 m ... first choices stand at the end: then the path goes on where
    all drafts of another branch are accepted. Its parent is the longest other path that it begins with, or the anchor.

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

    The first is higher than the model's own probability. So is the second, as a share of what the first leaves. Low
    probabilities rise most, because verification sees the earlier drafts, which were confirmed. The exponents were
    measured (docs/branches.md).

    Args:
        first, second: probabilities of the choices, where they were predicted.
    """
    accepted = first**ACCEPTED
    of_the_rest = (second / (1 - first).clamp(min=TIE)).clamp(0, 1)
    return accepted, (1 - accepted) * of_the_rest**SECOND
