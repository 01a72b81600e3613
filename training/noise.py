"""Training examples for masked models: stories and lists in which masks hide tokens.

The masks follow D2F's recipe, but for training from scratch. Each block has its own mask ratio, and the ratios do not
decrease along the answer. Attention is causal between groups of blocks, and full within a group. With one block per
group this is the block-causal window, with all blocks in one group the full window. Leading blocks without masks are
the cache.

Three additions teach directly what random masks teach slowly:

- *fact masking* hides every copy of a computed number or of the name, or all operations, so that they must be computed
  or read from the question;
- *left parts*: the left part of an answer is known and the rest is masked, as in decoding from left to right;
- *drills* are answers made of unrelated equations, in which only the results are hidden.

Lists mark no facts, so of these they have only left parts. In some of them, a right part is known, too.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from lopa_dist.tasks import word_problems as wp
from training.tokenizer import prompt_text

BLOCK_SIZES = (16, 32)
UNIT = 16  # canvases are multiples of the smallest block
LENGTHS = (96, 128)  # sequence lengths of stories and drills
MIN_RATIO = 0.15  # the smallest mask ratio t in a token's weight 1/t
NAME, OPERATION, FACTS = 5, 6, 7  # numbers of two facts, and of all facts; 0 to 4 are the results of computations
LEFT, AT_SENTENCE = 0.35, 0.6  # share of stories and lists with a left part; share of left parts that end a sentence


@dataclass
class TrainingExample:
    """An example before masking. `fact[i]` is the fact that token i states (0 to 4, NAME or OPERATION), or -1."""

    tokens: list[int]
    prompt: int  # number of tokens in the prompt
    canvas: int  # number of tokens after the prompt, a multiple of UNIT; the answer is padded with EOS
    fact: list[int]
    drill: bool


@dataclass
class TrainingBatch:
    """Numpy arrays [B, L]: inputs with masks, targets without, loss weights, and the end of what each token may see."""

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    weights: NDArray[np.float32]
    hi: NDArray[np.int64]
    numbers: NDArray[np.bool_]  # tokens that accuracy counts: masked results; without facts, all masks but filler


class Source(Protocol):
    """A source of examples: one kind of data."""

    lengths: tuple[int, ...]  # fixed lengths of sequences, so that compiled training sees few shapes
    causal_lengths: tuple[int, ...]  # the same for `causal`, with groups
    period: int | None  # the token that ends a sentence; None if the data has no sentences
    right: float  # share of examples with a left part in which a right part is known, too
    near: float  # factor on the weight of a mask with a known token at most two positions away

    def draw(self, progress: float) -> TrainingExample:
        """Return an example; `progress` (0 to 1) is the share of the training that is over."""


class Examples:
    """A seeded source of word problems in the tokens of `tokenizer`.

    `drills` are the shares of drills at the start of the training, and from 60 % of it on.
    """

    lengths: tuple[int, ...] = LENGTHS
    causal_lengths: tuple[int, ...] = (96, 160, 192)
    right = 0.0
    near = 1.0

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        split: wp.Split,
        seed: int,
        drills: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self.drills = drills
        self.rng = random.Random(f"examples-{split}-{seed}")
        self.problems = wp.problems(split, self.rng.randrange(1 << 30))
        self.ids = dict(tokenizer.get_vocab())
        self.eos = tokenizer.eos_token_id
        self.equals, self.period = self.ids["▁="], self.ids["▁."]
        self.number_ids = {self.ids[f"▁{n}"] for n in range(100)}
        self.name_ids = {self.ids["▁" + name] for name in wp.NAMES}

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text's words, each with its leading space; a dictionary is enough for that."""
        return [self.ids["▁" + w] for w in text.split()]

    def draw(self, progress: float) -> TrainingExample:
        """Return a story or a drill that fits into the largest length; `progress` is as in `Source`."""
        share = self.drills[0] + (self.drills[1] - self.drills[0]) * min(1.0, progress / 0.6)
        while True:
            example = self.drill() if self.rng.random() < share else self.story()
            if len(example.tokens) <= self.lengths[-1]:  # a drill after a long question may not fit
                return example

    def story(self) -> TrainingExample:
        """Return a word problem with its answer in words."""
        problem = next(self.problems)
        return self.example(problem.question, problem.answer, drill=False)

    def drill(self) -> TrainingExample:
        """Return a question, followed by sentences of steps that have nothing to do with it or with each other."""
        problem, rng = next(self.problems), self.rng
        name = rng.choice(wp.NAMES)
        sentences = []
        for _ in range(5):
            before = rng.choice(wp.RESULT_RANGE)
            operation = wp.random_operation(rng, before)
            sentences.append(wp.word_step(rng, operation, name))
        return self.example(problem.question, " ".join(sentences), drill=True)

    def example(self, question: str, answer: str, drill: bool) -> TrainingExample:
        """Return a question and its answer as tokens, padded with filler; only a drill may be cut off at the end."""
        user, assistant = self.ids["<|user|>"], self.ids["<|assistant|>"]
        assert prompt_text("") == "<|user|> <|assistant|>"
        prompt = [user, *self.encode(question), assistant]
        body = self.encode(answer)
        canvas = -(-(len(body) + (0 if drill else 1)) // UNIT) * UNIT
        if not drill and self.rng.random() < 0.1:  # one more block of filler, as larger blocks of a decoder have
            canvas += UNIT
        canvas = min(canvas, 80 if drill else 64)
        body = (body + [self.eos] * canvas)[:canvas]
        return TrainingExample(prompt + body, len(prompt), canvas, [-1] * len(prompt) + self._facts(body, drill), drill)

    def _facts(self, body: list[int], drill: bool) -> list[int]:
        """Return each token's fact; an equation's result is stated from its `=` to the next equation's first term."""
        kinds = [NAME if t in self.name_ids else -1 for t in body]
        equals = [i for i, t in enumerate(body) if t == self.equals]
        for number, start in enumerate(equals):
            kinds[start - 2] = kinds[start - 1] = OPERATION
            following = equals[number + 1] if number + 1 < len(equals) else len(body) + 3
            stop = following - 4 if drill else following - 3  # in a drill, the next first term is not this result
            for i in range(start + 1, min(stop + 1, len(body))):
                if body[i] in self.number_ids:
                    kinds[i] = number
        return kinds


def masked_batch(
    examples: list[TrainingExample],
    length: int,
    mask_id: int,
    pad_id: int,
    period_id: int | None,
    rng: np.random.Generator,
    right: float = 0.0,
    near: float = 1.0,
) -> TrainingBatch:
    """Return a batch of `examples`, padded to `length`, with groups of blocks, mask ratios and masks drawn from `rng`.

    The token `period_id` ends their sentences; `right` and `near` are as in `Source`.
    """
    n, blocks = len(examples), length // UNIT
    targets = np.full((n, length), pad_id, np.int64)
    fact = np.full((n, length), -1)
    for row, example in enumerate(examples):
        targets[row, : len(example.tokens)] = example.tokens
        fact[row, : len(example.tokens)] = example.fact
    prompt = np.array([e.prompt for e in examples])[:, None]
    canvas = np.array([e.canvas for e in examples])[:, None]
    drill = np.array([e.drill for e in examples])[:, None]
    size = rng.choice(BLOCK_SIZES, (n, 1))
    offset = np.arange(length)[None] - prompt  # [B, L] position, counted from the end of the prompt
    answer = (offset >= 0) & (offset < canvas)
    block = np.clip(offset // size, 0, blocks - 1)
    count = -(-canvas // size)

    # groups of blocks: a block begins a new group or joins the group before it
    index = np.arange(blocks)[None]
    whole = rng.random((n, 1)) < 0.5
    clean = np.where(rng.random((n, 1)) < 0.35, (rng.random((n, 1)) * count).astype(int), 0)  # leading unmasked blocks
    joined = np.where(whole, index > clean, rng.random((n, blocks)) < 0.25)
    joined |= (index == clean) & (rng.random((n, 1)) < 0.25)  # now and then, the last unmasked blocks see the window
    group = np.cumsum(~joined | (index == 0), 1)
    last = np.stack([(group <= g).sum(1) for g in range(1, blocks + 1)], 1)  # blocks in groups 1..g
    end = np.take_along_axis(last, group - 1, 1)  # [B, blocks] the block after the last one of each block's group
    hi = np.where(answer, prompt + np.minimum(np.take_along_axis(end, block, 1) * size, canvas), prompt)

    # mask ratios: the same in all blocks of a whole window, or not decreasing from block to block
    ratio = (rng.permutation(n)[:, None] + rng.random((n, 1))) / n  # spread evenly over the batch
    rising = np.sort(rng.random((n, blocks)), 1)
    rising = ratio + (1 - ratio) * (rising - rising[:, :1])  # the first block has the evenly spread ratio
    per_block = np.where(whole & (rng.random((n, 1)) < 0.5), ratio, rising)
    per_block = np.where(index < clean, 0.0, per_block)
    masked = rng.random((n, length)) < np.take_along_axis(per_block, block, 1)

    # fact masking: hide all statements of some facts, in addition to the random masks or alone
    hidden = rng.random((n, FACTS)) < rng.choice([0.15, 0.4, 1.0], (n, 1))
    facts = (fact >= 0) & np.take_along_axis(hidden, np.clip(fact, 0, FACTS - 1), 1)
    result = (fact >= 0) & (fact < NAME)
    has_facts = (fact >= 0).any(1, keepdims=True)
    chance = rng.random((n, 1))
    masked = np.where(has_facts & (chance < 0.2), facts, masked | (facts & (chance < 0.55) & (offset >= clean * size)))
    named = fact == NAME
    alone = has_facts & (rng.random((n, 1)) < 0.15)  # copying names is learned only if some rows hide nothing else
    masked = np.where(alone, named, masked)
    # left parts: only the left part is known, as for a decoder that fills the leftmost mask first. The first word of a
    # sentence tells whether another step follows, so many left parts end right before one
    cut = (rng.random((n, 1)) * canvas).astype(int)
    begins = answer & ((offset == 0) | (np.roll(targets, 1, 1) == period_id))
    sentence = np.argmax(np.where(begins, rng.random((n, length)), -1.0), 1)[:, None] - prompt
    cut = np.where(rng.random((n, 1)) < (0.0 if period_id is None else AT_SENTENCE), sentence, cut)
    left = ~drill & (rng.random((n, 1)) < LEFT)
    stop = cut + 1 + (rng.random((n, 1)) * (canvas - cut)).astype(int)  # where a known right part begins
    stop = np.where(rng.random((n, 1)) < right, stop, canvas)
    masked = np.where(left, (offset >= cut) & (offset < stop), masked)
    masked = np.where(drill, result, masked) & answer
    following = left & (offset == cut)  # the mask that such a decoder fills next

    inside = block + np.arange(n)[:, None] * blocks
    total = np.bincount(inside[answer], minlength=n * blocks)
    holes = np.bincount(inside[masked], minlength=n * blocks)
    share = (holes / np.maximum(total, 1))[inside]
    filler = (targets == pad_id) & (np.roll(targets, 1, 1) == pad_id)  # every EOS except the first
    importance = np.where(filler, 0.1, np.where(named | following, 4.0, np.where(fact >= 0, 2.0, 1.0)))
    known = np.pad(~masked & (offset < canvas), ((0, 0), (2, 2)))
    beside = known[:, :-4] | known[:, 1:-3] | known[:, 3:-1] | known[:, 4:]
    importance = importance * np.where(beside & ~filler, near, 1.0)
    weights = masked / np.maximum(share, MIN_RATIO) * importance
    numbers = masked & np.where(has_facts, result, ~filler)
    return TrainingBatch(np.where(masked, mask_id, targets), targets, weights.astype(np.float32), hi, numbers)
