"""Training of a strictly causal diffusion model, which learns next tokens and drafts from masks in one forward.

The *clean* rows of a sequence are its prompt and its answer. Clean rows have causal attention, and each predicts the
next token. They are followed by *groups* of masks. A group belongs to a position s of the sequence. Its masks are at
s+1, s+2, ... The masks see the clean rows up to s and the masks of their own group up to themselves, and predict the
tokens at s+2, s+3, ... (I-DLM, arXiv 2604.11035). So a group never sees the token at s+1, just as a decoder's masks do
not see the token that is predicted in the same forward. Clean rows see no masks, so they learn like the rows of an
autoregressive model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from lopa_dist.models.transformer import Transformer
from training.attention import dense
from training.noise import NAME, TrainingExample

LEAST = 64  # rows for groups that a sequence has at least; with a short answer, A_TOKEN for each of its tokens
A_TOKEN = 3
GROUPS = (4, 8, 16)  # numbers of masks that a group may have
DRAFTS = 0.3, 1.0  # weight of a mask's prediction, early and late in training; an ordinary next token has the weight 1
FACT, BEGINNING = 3.0, 2.0  # weights of names, operations and results, and of a sentence's first word


@dataclass
class CausalBatch:
    """Numpy arrays [B, L] of rows. Clean rows are in group 0; a row predicts the token after its position."""

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]  # the token that the row predicts
    weights: NDArray[np.float32]
    positions: NDArray[np.int64]
    last: NDArray[np.int64]  # the last clean position that the row sees
    groups: NDArray[np.int64]
    numbers: NDArray[np.bool_]  # rows that accuracy counts: clean ones that predict a result; without facts, the answer


def end_of(example: TrainingExample, pad_id: int) -> int:
    """Return the position of the end-of-text after the answer, which is also the number of clean rows."""
    return example.tokens.index(pad_id, example.prompt)


def rows_of(example: TrainingExample, pad_id: int) -> int:
    """Return how many rows an example needs at least."""
    end = end_of(example, pad_id)
    return end + (0 if example.drill else min(LEAST, A_TOKEN * (end - example.prompt)))


def causal_batch(
    examples: list[TrainingExample],
    length: int,
    mask_id: int,
    pad_id: int,
    period_id: int | None,
    rng: np.random.Generator,
    draft: float = 1.0,
) -> CausalBatch:
    """Lay out each of the `examples` in `length` rows: clean rows first, then as many groups as fit.

    `draft` is the weight of a mask's prediction. Drills have no groups, because nothing can foresee their equations.
    """
    shape = len(examples), length
    inputs, targets = np.full(shape, pad_id, np.int64), np.full(shape, pad_id, np.int64)
    weights, numbers = np.zeros(shape, np.float32), np.zeros(shape, bool)
    positions, last, groups = (np.zeros(shape, np.int64) for _ in range(3))
    for row, example in enumerate(examples):
        tokens, fact = np.array(example.tokens), np.array(example.fact)
        first = example.prompt
        end = end_of(example, pad_id)
        inputs[row, :end] = tokens[:end]
        targets[row, :end] = tokens[1 : end + 1]
        positions[row] = last[row] = np.arange(length)
        result = (fact >= 0) & (fact < NAME) if fact.max() >= 0 else np.arange(len(tokens)) >= first
        importance = np.where(fact >= 0, FACT, np.where(np.roll(tokens, 1) == period_id, BEGINNING, 1.0))
        importance[first] = BEGINNING
        weight = np.where(result, FACT, 0.0) if example.drill else importance
        weights[row, first - 1 : end] = weight[first : end + 1]
        numbers[row, first - 1 : end] = result[first : end + 1]
        begin, group = end, 0
        while not example.drill and begin < length:
            s = int(rng.integers(first - 1, end - 1))
            stop = min(begin + int(rng.choice(GROUPS)), begin + end - 1 - s, length)
            count, group = stop - begin, group + 1
            inputs[row, begin:stop] = mask_id
            targets[row, begin:stop] = tokens[s + 2 : s + 2 + count]
            positions[row, begin:stop] = s + 1 + np.arange(count)
            last[row, begin:stop], groups[row, begin:stop] = s, group
            weights[row, begin:stop] = draft
            begin = stop
    return CausalBatch(inputs, targets, weights, positions, last, groups, numbers)


def hidden_rows(positions: Tensor, last: Tensor, groups: Tensor) -> Tensor:
    """Return which keys (dim 2) a row (dim 1) does not see, ``[B, L, L]`` bool; arguments are as in `CausalBatch`."""
    own = (groups[:, :, None] == groups[:, None]) & (positions[:, None] <= positions[:, :, None])
    clean = (groups[:, None] == 0) & (positions[:, None] <= last[:, :, None])
    return ~(own | clean)


class CausalLoss(torch.nn.Module):
    """Computes the weighted cross-entropy of all rows' predictions, and how many of the counted ones are right."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        inputs: Tensor,
        targets: Tensor,
        weights: Tensor,
        positions: Tensor,
        last: Tensor,
        groups: Tensor,
        numbers: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (loss, right, counted) of a `CausalBatch`; `cos` and `sin` [L, 1, D] are tables of the positions."""
        attend = dense(self.model.config, hidden_rows(positions, last, groups))
        rope = cos[positions.flatten()], sin[positions.flatten()]
        hidden = self.model.rotated(inputs.flatten(), rope, attend)
        logits = F.linear(hidden, self.model.head_weight).float()
        losses = F.cross_entropy(logits, targets.flatten(), reduction="none")
        loss = (losses * weights.flatten()).sum() / weights.sum()
        right = (logits.argmax(-1) == targets.flatten()) & numbers.flatten()
        return loss, right.sum(), numbers.sum()
