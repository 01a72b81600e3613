"""Answers that the model itself writes during its training, on which it learns drafts.

The wording of a generated answer is random, so nothing can foresee it many tokens ahead. But a greedy decoder writes
only one wording, and drafts only have to foresee this one. So once the model solves problems, up to half of the
examples have its own right answers. Masks learn what the model will write, and it becomes surer of its wording.
"""

from __future__ import annotations

import random
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor

from lopa_dist.models.transformer import Transformer
from lopa_dist.tasks import word_problems as wp
from training.noise import Examples, TrainingExample

SHARE = 0.5  # share of the model's own answers among the examples, once KEPT answers are kept
FROM = 0.12  # progress of the training from which on the model writes answers
EVERY, COUNT = 40, 256  # it writes COUNT answers every EVERY steps
KEPT = 2048  # so many of the latest right answers are kept
LONGEST = 64  # most tokens of an answer


class OwnAnswers:
    """A source that mixes the examples of `source` with the model's own answers to training problems."""

    lengths, causal_lengths = Examples.lengths, Examples.causal_lengths
    right = Examples.right
    near = Examples.near

    def __init__(self, source: Examples, model: Transformer, seed: int) -> None:
        self.source, self.model = source, model
        self.period: int | None = source.period
        self.rng = random.Random(f"own-{seed}")
        self.problems = wp.problems("train", self.rng.randrange(1 << 30))
        self.words = {i: word.lstrip("▁") for word, i in source.ids.items()}
        self.kept: list[TrainingExample] = []

    def draw(self, progress: float) -> TrainingExample:
        """Return an example; `progress` (0 to 1) is the share of the training that is over."""
        if self.rng.random() < SHARE * len(self.kept) / KEPT:  # drawn too often, a few answers would be memorised
            return self.rng.choice(self.kept)
        return self.source.draw(progress)

    def write(self, count: int) -> float:
        """Let the model answer `count` problems, and keep the right answers; return their share."""
        problems = list(islice(self.problems, count))
        ids = self.source.ids
        prompts = [
            [ids["<|user|>"], *self.source.encode(problem.question), ids["<|assistant|>"]] for problem in problems
        ]
        answers = greedy(self.model, prompts, LONGEST)
        written = []
        for problem, answer in zip(problems, answers, strict=True):
            text = " ".join(self.words.get(token, "") for token in answer)
            if len(answer) == len(problem.answer.split()) and text.endswith(f"#### {problem.result}"):
                written.append(self.source.example(problem.question, text, drill=False))
        self.kept = (self.kept + written)[-KEPT:]  # a new list, because a thread may be drawing from the old one
        return len(written) / count


@torch.no_grad()
def greedy(model: Transformer, prompts: list[list[int]], most: int) -> list[list[int]]:
    """Return a causal model's answers, written greedily and one token at a time.

    The answers end before the end-of-text, and have at most `most` tokens.
    """
    config, device = model.config, model.head_weight.device
    count, longest = len(prompts), max(map(len, prompts))
    total = longest + most
    ends = torch.tensor([len(p) for p in prompts], device=device)
    tokens = torch.tensor([p + [config.pad_id] * (longest - len(p)) for p in prompts], device=device)
    shape = config.layers, count, config.kv_heads, total, config.head_dim
    keys, values = torch.zeros(shape, device=device), torch.zeros(shape, device=device)
    sequence = torch.arange(count, device=device)[:, None]

    def hidden(tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the hidden states ``[B, R, d]`` of rows ``[B, R]``, which see all earlier positions; keep the K/V."""
        seen = torch.arange(total, device=device) <= positions[:, None, :, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            for kept, new in ((keys[layer], k), (values[layer], v)):
                kept[sequence, :, positions] = new.unflatten(0, tokens.shape).to(kept.dtype)
            q = q.unflatten(0, tokens.shape).transpose(1, 2).to(keys.dtype)
            mixed = F.scaled_dot_product_attention(q, keys[layer], values[layer], attn_mask=seen, enable_gqa=True)
            return mixed.transpose(1, 2).flatten(0, 1)

        return model(tokens.flatten(), positions.flatten(), attend).unflatten(0, tokens.shape)

    rows = hidden(tokens, torch.arange(longest, device=device).expand(count, -1))
    last, positions = rows[sequence, ends[:, None] - 1], ends[:, None]
    written = torch.full((count, most), config.eos_ids[0], device=device)
    done = torch.zeros(count, 1, dtype=torch.bool, device=device)
    for i in range(most):
        following = F.linear(last, model.head_weight).argmax(-1)
        done = done | (following == config.eos_ids[0])
        if bool(done.all()):
            break
        written[:, i : i + 1] = torch.where(done, config.eos_ids[0], following)
        last, positions = hidden(following, positions), positions + 1
    return [row[: row.index(config.eos_ids[0])] if config.eos_ids[0] in row else row for row in written.tolist()]
