"""Training examples of list problems: a question and one of perhaps many right answers, without marked facts."""

from __future__ import annotations

import random

from transformers import PreTrainedTokenizerFast

from lopa_dist.tasks import list_problems as lp
from lopa_dist.tasks.word_problems import Split, split_of
from training.noise import UNIT, TrainingExample

CANVAS = 144  # tokens of the longest answer with its end-of-text and a block of filler
CURRICULUM = ((0.08, 8), (0.18, 16), (0.27, 30), (0.36, 60))
"""Pairs of a progress (the share of the training that is over) and the most items in a list until then."""
WEIGHTS = {"copy": 2, "reverse": 2, "sort": 2, "shuffle": 2, "insert": 3, "remove": 2, "replace": 2, "latin": 2}
"""How often each family is drawn: a family that is harder to learn is drawn more often."""
SHORT, FEW = 0.4, 9  # throughout the training, this share of the examples is limited to FEW items


class ListExamples:
    """A seeded source of examples in the tokens of `tokenizer`."""

    lengths: tuple[int, ...] = (32, 64, 96, 160, 288)
    causal_lengths: tuple[int, ...] = (32, 64, 128, 208, 352)
    period: int | None = None
    right = 0.4
    near = 6.0

    def __init__(self, tokenizer: PreTrainedTokenizerFast, split: Split, seed: int) -> None:
        self.rng = random.Random(f"list-examples-{split}-{seed}")
        self.split = split
        self.ids = dict(tokenizer.get_vocab())
        self.eos = tokenizer.eos_token_id

    def draw(self, progress: float) -> TrainingExample:
        """Return an example; `progress` (0 to 1) is the share of the training that is over."""
        longest = next((items for until, items in CURRICULUM if progress < until), lp.LONGEST)
        if self.rng.random() < SHORT:
            longest = min(longest, FEW)
        family = self.rng.choices([*WEIGHTS], [*WEIGHTS.values()])[0]
        while True:
            problem = lp.random_problem(self.rng, family, longest)
            if split_of(problem.question) == self.split:
                return self.example(problem)

    def example(self, problem: lp.ListProblem) -> TrainingExample:
        """Return a problem as tokens; one in ten has one more block of filler, as larger blocks of a decoder have."""
        words = [self.ids["▁" + word] for word in problem.question.split()]
        prompt = [self.ids["<|user|>"], *words, self.ids["<|assistant|>"]]
        body = [self.ids["▁" + word] for word in problem.answer.split()]
        canvas = -(-(len(body) + 1) // UNIT) * UNIT
        if self.rng.random() < 0.1:
            canvas = min(canvas + UNIT, CANVAS)
        body += [self.eos] * (canvas - len(body))
        return TrainingExample(prompt + body, len(prompt), canvas, [-1] * (len(prompt) + canvas), drill=False)
