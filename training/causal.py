"""Training of a strictly causal diffusion model: next tokens, and drafts from masks, in one forward.

A sequence has *clean* rows, its prompt and its answer, under causal attention; each predicts the next token. Behind
them stand *groups* of masks. A group belongs to a position s of the sequence. Its masks stand at s+1, s+2, ..., see the
clean rows up to s and the masks of their own group up to themselves, and predict the tokens at s+2, s+3, ... (I-DLM,
arXiv 2604.11035). So a group never sees the token at s+1, as the masks of a decoder do not see the token that is
predicted in the same forward. Clean rows see no masks: they are trained as the rows of an autoregressive model.
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

LEAST = 64  # rows that the sequence of a story has for groups; one of a short answer has this many a token
A_TOKEN = 3
GROUPS = (4, 8, 16)  # masks of a group
DRAFTS = 0.3, 1.0  # weights of a mask's prediction, early and late; a wording's next token has the weight 1
FACT, BEGINNING = 3.0, 2.0  # weight of names, operations and results, and of a sentence's first word


@dataclass
class CausalBatch:
    """Numpy arrays [B, L] of rows. Clean rows are in group 0; a row predicts the token behind its position."""

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]  # the token that the row predicts
    weights: NDArray[np.float32]
    positions: NDArray[np.int64]
    last: NDArray[np.int64]  # the last clean position that the row sees
    groups: NDArray[np.int64]
    numbers: NDArray[np.bool_]  # what accuracy counts: clean rows that predict a result; without facts, the answer


def end_of(example: TrainingExample, pad_id: int) -> int:
    """The position of the end-of-text, behind the answer; equals the example's number of clean rows."""
    return example.tokens.index(pad_id, example.prompt)


def rows_of(example: TrainingExample, pad_id: int) -> int:
    """How many rows an example needs at least."""
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
    """Lay out `examples` in rows of `length`; what the clean rows of one leave is filled with groups.

    `draft` is the weight of a mask's prediction. Drills have no groups, for nobody can foresee their equations.
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
    """``[B, L, L]``: which keys (dimension 2) a row (dimension 1) does not see; the arguments as in `CausalBatch`."""
    own = (groups[:, :, None] == groups[:, None]) & (positions[:, None] <= positions[:, :, None])
    clean = (groups[:, None] == 0) & (positions[:, None] <= last[:, :, None])
    return ~(own | clean)


class CausalLoss(torch.nn.Module):
    """Weighted cross-entropy of all rows' predictions, and how many of the counted ones are right."""

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
        """A `CausalBatch` and the tables of positions [L, 1, D]; gives (loss, right, counted)."""
        attend = dense(self.model.config, hidden_rows(positions, last, groups))
        rope = cos[positions.flatten()], sin[positions.flatten()]
        hidden = self.model.rotated(inputs.flatten(), rope, attend)
        logits = F.linear(hidden, self.model.head_weight).float()
        losses = F.cross_entropy(logits, targets.flatten(), reduction="none")
        loss = (losses * weights.flatten()).sum() / weights.sum()
        right = (logits.argmax(-1) == targets.flatten()) & numbers.flatten()
        return loss, right.sum(), numbers.sum()
