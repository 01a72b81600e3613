"""Training examples of lists are what the template and the tokenizer make, and what a decoder meets is masked."""

from __future__ import annotations

import random

import numpy as np
import pytest

from lopa_dist.tasks import list_problems as lp
from lopa_dist.tasks.word_problems import split_of
from training import tokenizer
from training.list_examples import CANVAS, CURRICULUM, WEIGHTS, ListExamples
from training.noise import UNIT, masked_batch
from training.train import TrainConfig, source_of, tokenizer_of, train
from training.vocabularies import list_words

WORDS = tokenizer.build(list_words())
MASK, EOS = WORDS.mask_token_id, WORDS.eos_token_id


def test_every_word_is_one_token() -> None:
    for word in list_words():
        assert len(WORDS.encode(" " + word, add_special_tokens=False)) == 1


def test_examples_are_what_the_chat_template_and_the_tokenizer_make() -> None:
    source, rng = ListExamples(WORDS, "train", 0), random.Random(0)
    for family in lp.FAMILIES * 20:
        problem = lp.random_problem(rng, family)
        example = source.example(problem)
        messages = [{"role": "user", "content": problem.question}]
        prompt = WORDS.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        tokens = WORDS.encode(f"{prompt} {problem.answer}", add_special_tokens=False)
        assert example.tokens[: len(tokens)] == tokens
        filler = example.tokens[len(tokens) :]
        assert filler
        assert set(filler) == {EOS}
        assert example.prompt == len(WORDS.encode(prompt, add_special_tokens=False))
        assert example.canvas % UNIT == 0
        assert example.canvas <= CANVAS
        assert len(example.tokens) == len(example.fact) == example.prompt + example.canvas <= source.lengths[-1]


def test_every_family_is_seen() -> None:
    assert set(WEIGHTS) == set(lp.FAMILIES)
    assert min(WEIGHTS.values()) > 0


def test_lists_are_short_at_first_and_of_the_right_split() -> None:
    source = ListExamples(WORDS, "held_out", 0)
    for progress, longest in (*((until - 0.01, items) for until, items in CURRICULUM), (1.0, lp.LONGEST)):
        lengths = []
        for _ in range(1200):
            example = source.draw(progress)
            question = WORDS.decode(example.tokens[1 : example.prompt - 1]).strip()
            assert split_of(question) == "held_out"
            if not question.startswith("complete"):
                lengths.append(len(question.partition(" : ")[2].split()))
        assert longest - 2 <= max(lengths) <= longest


def test_left_parts_and_gaps_are_seen_often_and_no_row_is_wasted() -> None:
    source = ListExamples(WORDS, "train", 1)
    examples = [e for e in (source.draw(1.0) for _ in range(400)) if len(e.tokens) <= 128]
    batch = masked_batch(examples, 128, MASK, EOS, None, np.random.default_rng(0), source.right)
    left = gaps = empty = 0
    for row, example in enumerate(examples):
        body = slice(example.prompt, example.prompt + example.canvas)
        masked = batch.inputs[row, body] == MASK
        assert ((batch.inputs == MASK)[row].sum()) == masked.sum()
        assert not (batch.numbers[row, body] & ~masked).any()
        holes = np.flatnonzero(masked)
        empty += not holes.size
        if 3 <= holes.size == holes[-1] - holes[0] + 1 and holes[0] > 0:
            left += holes[-1] == example.canvas - 1
            gaps += holes[-1] < example.canvas - 1
    assert left / len(examples) > 0.1
    assert gaps / len(examples) > 0.05
    assert empty / len(examples) < 0.1


def test_masks_beside_known_tokens_weigh_more() -> None:
    source = ListExamples(WORDS, "train", 2)
    examples = [e for e in (source.draw(0.0) for _ in range(100)) if len(e.tokens) <= 64]
    plain, near = (
        masked_batch(examples, 64, MASK, EOS, None, np.random.default_rng(0), source.right, weight)
        for weight in (1.0, source.near)
    )
    assert (plain.inputs == near.inputs).all()
    for row, example in enumerate(examples):
        known = [plain.inputs[row, i] != MASK for i in range(len(example.tokens))]
        for i in np.flatnonzero(plain.weights[row]):
            filler = example.tokens[i] == example.tokens[i - 1] == EOS
            beside = any(known[max(0, i - 2) : i + 3]) and not filler
            assert near.weights[row, i] == pytest.approx(plain.weights[row, i] * (source.near if beside else 1))


def test_kinds_of_data() -> None:
    lists, stories = TrainConfig(data="lists"), TrainConfig()
    assert isinstance(source_of(lists, tokenizer_of(lists), "train", 0), ListExamples)
    assert tokenizer_of(lists).get_vocab() == WORDS.get_vocab()
    assert tokenizer_of(stories).get_vocab() == tokenizer.build().get_vocab()
    with pytest.raises(ValueError, match=r"train\.data='sums'"):
        train(TrainConfig(data="sums"))
