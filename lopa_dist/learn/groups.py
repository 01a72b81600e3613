"""Groups of masks after positions of answers, as the engine runs them: what is trained.

For a position s of an answer, masks at s+1 ... s+n predict the tokens at s+2 ... s+n+1. They see the tokens up to s,
and the masks of their own group up to themselves (`rows.causal_rows`; I-DLM, arXiv 2604.11035). Where masks draft in
blocks (linear self-speculation, arXiv 2607.05722), a copy of the token at s and a mask at s+1 come first, n masks at
s+2 ... s+n+1 predict their own positions, and all of them see one another.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lopa_dist.ragged import Ints


class Answer(NamedTuple):
    """A finished answer.

    `tokens` end with the end-of-text if the model wrote one.
    """

    prompt: list[int]
    tokens: list[int]


@dataclass(frozen=True)
class GroupBatch:
    """B answers side by side, each with up to G groups of `masks` masks, as numpy arrays.

    Attributes:
        tokens: ``[B, T]`` prompts and answers, padded at the end.
        starts: ``[B, G]`` the position s of each group.
        counts: ``[B, G]`` how many of its masks predict a token of the answer; 0: the group is padding.
    """

    tokens: NDArray[np.int64]
    starts: Ints
    counts: Ints
    masks: int

    @property
    def rows(self) -> int:
        """Return how many masks predict a token of an answer."""
        return int(self.counts.sum())


def group_batches(
    answers: list[Answer],
    masks: int,
    rows: int,
    rng: np.random.Generator,
    pad_id: int,
    share: float = 1.0,
    tokens: float = inf,
) -> list[GroupBatch]:
    """Return all answers in batches of about `rows` masks, in random order; answers of similar length share a batch.

    Args:
        answers: with at least two tokens each; shorter ones have nothing to draft.
        masks: masks per group.
        rows: masks per batch, padding included. If one answer would need more, it gets groups at only as many random
            positions as fit.
        rng: makes the random choices.
        pad_id: pads the rows of `GroupBatch.tokens`.
        share: the share of each answer's positions that have a group.
        tokens: the most tokens of a batch's texts, padding included; one text alone may have more.
    """
    most = max(1, rows // masks)
    groups = np.array([min(most, max(1, round(share * (len(a.tokens) - 1)))) for a in answers])
    lengths = np.array([len(a.prompt) + len(a.tokens) for a in answers])
    order = np.lexsort((rng.random(len(answers)), groups))
    batches, begin = [], 0
    while begin < len(order):
        stop, longest = begin + 1, lengths[order[begin]]
        while stop < len(order) and (stop + 1 - begin) * groups[order[stop]] <= most:
            longest = max(longest, lengths[order[stop]])
            if (stop + 1 - begin) * longest > tokens:
                break
            stop += 1
        batches.append(
            group_batch([answers[i] for i in order[begin:stop]], masks, groups[order[begin:stop]], rng, pad_id)
        )
        begin = stop
    return [batches[i] for i in rng.permutation(len(batches))]


def group_batch(answers: list[Answer], masks: int, groups: Ints, rng: np.random.Generator, pad_id: int) -> GroupBatch:
    """Return one batch, with ``groups [B]`` groups after random positions of the answers."""
    longest = max(len(a.prompt) + len(a.tokens) for a in answers)
    tokens = np.full((len(answers), longest), pad_id)
    starts, counts = np.zeros((2, len(answers), int(groups.max())), np.int64)
    for row, (answer, count) in enumerate(zip(answers, groups, strict=True)):
        end = len(answer.prompt) + len(answer.tokens)
        tokens[row, :end] = answer.prompt + answer.tokens
        first = len(answer.prompt) - 1  # the prompt's last token, whose row predicts the answer's first one
        chosen = first + np.sort(rng.choice(len(answer.tokens) - 1, count, replace=False))
        starts[row, :count] = chosen
        counts[row, :count] = np.minimum(masks, end - 2 - chosen)  # mask i predicts position s + 1 + i
    return GroupBatch(tokens, starts, counts, masks)
