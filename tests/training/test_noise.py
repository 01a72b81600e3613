"""Training examples hide what they should, label what they should, and show each row what it may see."""

from __future__ import annotations

import random
from functools import cache
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lopa_dist.tasks import word_problems as wp
from training import tokenizer
from training.noise import (
    LENGTHS,
    MIN_RATIO,
    NAME,
    OPERATION,
    UNIT,
    Examples,
    TrainingBatch,
    TrainingExample,
    masked_batch,
)

WORDS = tokenizer.build()
MASK, EOS, PAD = WORDS.mask_token_id, WORDS.eos_token_id, WORDS.pad_token_id
PERIOD = WORDS.convert_tokens_to_ids("▁.")


@cache
def pool(length: int) -> list[TrainingExample]:
    """Stories and drills that fit."""
    source = Examples(WORDS, "train", 0)
    examples = [e for _ in range(150) for e in (source.story(), source.drill())]
    return [e for e in examples if len(e.tokens) <= length]


def batch_of(seed: int, length: int, count: int = 24) -> tuple[list[TrainingExample], TrainingBatch]:
    examples = random.Random(seed).sample(pool(length), count)
    return examples, masked_batch(examples, length, MASK, PAD, PERIOD, np.random.default_rng(seed))


batches = given(seed=st.integers(0, 2**32 - 1), length=st.sampled_from(LENGTHS))
quick = settings(max_examples=40, deadline=None)


@batches
@quick
def test_only_answers_are_masked_and_only_masks_weigh(seed: int, length: int) -> None:
    examples, batch = batch_of(seed, length)
    shapes = {x.shape for x in (batch.inputs, batch.targets, batch.weights, batch.hi, batch.numbers)}
    assert shapes == {(24, length)}
    masked = batch.inputs == MASK
    for row, example in enumerate(examples):
        used = len(example.tokens)
        assert used == example.prompt + example.canvas
        assert batch.targets[row, :used].tolist() == example.tokens
        assert (batch.targets[row, used:] == PAD).all()
        assert not masked[row, : example.prompt].any()
        assert not masked[row, used:].any()
    assert (batch.inputs == batch.targets)[~masked].all()
    assert not (batch.targets == MASK).any()
    assert ((batch.weights > 0) == masked).all()
    assert batch.weights.dtype == np.float32
    filler = (batch.targets == EOS) & (np.roll(batch.targets, 1, axis=1) == EOS)
    assert batch.weights[masked & ~filler].min(initial=1) >= 1
    assert batch.weights[masked & filler].max(initial=0) <= np.float32(0.1 / MIN_RATIO)
    assert batch.weights.max() <= np.float32(4 / MIN_RATIO)


@batches
@quick
def test_rows_see_a_prefix_that_grows_along_the_answer(seed: int, length: int) -> None:
    examples, batch = batch_of(seed, length)
    for row, example in enumerate(examples):
        end = example.prompt + example.canvas
        hi = batch.hi[row, example.prompt : end]
        assert (batch.hi[row, : example.prompt] == example.prompt).all()
        assert (np.diff(hi) >= 0).all()
        assert (hi > np.arange(example.prompt, end)).all()  # a row sees itself
        assert hi[-1] == end
        offsets = hi - example.prompt
        assert ((offsets % UNIT == 0) & (offsets <= example.canvas)).all()
        ends = np.unique(offsets)  # of groups: their rows see up to the group's end, which the next one begins at
        assert all((offsets[a:b] == b).all() for a, b in zip([0, *ends], ends, strict=False))


@batches
@quick
def test_drills_hide_their_results_and_nothing_else(seed: int, length: int) -> None:
    examples, batch = batch_of(seed, length)
    for row, example in enumerate(examples):
        facts = np.full(length, -1)
        facts[: len(example.fact)] = example.fact
        results = (facts >= 0) & (facts < NAME)
        masked = batch.inputs[row] == MASK
        assert (batch.numbers[row] == (masked & results)).all()
        if example.drill:
            assert (masked == results).all()


@batches
@quick
def test_weights_are_the_inverse_of_the_masked_share(seed: int, length: int) -> None:
    """In a story without facts, a block's weights sum to its length wherever the share is not clamped.

    All but the first mask of a left part, which weighs fourfold.
    """
    example = TrainingExample([5] * (10 + 64), 10, 64, [-1] * 74, drill=False)
    batch = masked_batch([example] * 8, length, MASK, PAD, PERIOD, np.random.default_rng(seed))
    for masked, weights in zip(batch.inputs[:, 10:74] == MASK, batch.weights[:, 10:74], strict=True):
        fits = []
        for size in (16, 32):
            holes = masked.reshape(-1, size).sum(1)
            wanted = size / np.maximum(holes, MIN_RATIO * size)
            expected = (wanted[:, None] * masked.reshape(-1, size)).reshape(-1)
            fits.append(np.allclose(weights, expected, rtol=1e-5))
            if masked.any() and masked[masked.argmax() :].all():
                expected[masked.argmax()] *= 4
                fits.append(np.allclose(weights, expected, rtol=1e-5))
        assert any(fits)


def test_later_blocks_are_masked_more() -> None:
    sentences = ([5] * 9 + [PERIOD]) * 8
    example = TrainingExample([5] * 10 + sentences, 10, 80, [-1] * 90, drill=False)
    rng = np.random.default_rng(0)
    batches = [masked_batch([example] * 64, 96, MASK, PAD, PERIOD, rng) for _ in range(40)]
    masked = np.concatenate([b.inputs[:, 10:90] == MASK for b in batches]).reshape(-1, 5, 16).mean(2)
    masked = masked[masked.any(1)]  # without the rows that hide names alone: there are none here
    share = masked.mean(0)
    assert (np.diff(share) > 0).all()
    assert share[0] < 0.5 < share[-1]
    assert (masked == 1).all(1).mean() > 0.005  # what decoding begins with is seen: nothing but masks
    assert ((masked[:, 0] == 0) & (masked[:, -1] > 0)).mean() > 0.1  # and clean blocks in front


def test_left_parts_end_where_sentences_end() -> None:
    """What decoding from the left meets is seen often, at the first words of sentences more often than elsewhere."""
    example = TrainingExample([5] * 10 + ([5] * 9 + [PERIOD]) * 8, 10, 80, [-1] * 90, drill=False)
    rng = np.random.default_rng(0)
    batches = [masked_batch([example] * 64, 96, MASK, PAD, PERIOD, rng) for _ in range(40)]
    masked = np.concatenate([b.inputs[:, 10:90] == MASK for b in batches])
    cut = masked.argmax(1)
    left = masked.any(1) & (masked == (np.arange(80) >= cut[:, None])).all(1)
    counts = np.bincount(cut[left], minlength=80)
    assert left.mean() > 0.3
    assert counts[::10].min() > 4 * counts[1::10].max() > 0


def test_windows_of_both_kinds_are_seen() -> None:
    full = causal = 0
    for seed in range(20):
        examples, batch = batch_of(seed, 128)
        for row, e in enumerate(examples):
            ends = np.unique(batch.hi[row, e.prompt : e.prompt + e.canvas] - e.prompt).tolist()
            full += ends == [e.canvas]
            causal += ends == list(range(UNIT, e.canvas + 1, UNIT))
    assert full > 40
    assert causal > 40


def test_batches_repeat_by_seed() -> None:
    a, b, c = (batch_of(seed, 128)[1] for seed in (7, 7, 8))
    assert all((getattr(a, k) == getattr(b, k)).all() for k in ("inputs", "targets", "weights", "hi", "numbers"))
    assert (a.inputs != c.inputs).any()


def sentence_facts(sentence: list[str], before: int, result: int) -> list[int]:
    """Facts of a step sentence; `before` is the result that its first term repeats, or -1."""
    facts = [NAME if w in wp.NAMES else -1 for w in sentence]
    equals = sentence.index("=")
    facts[equals - 3 : equals + 2] = [before, OPERATION, OPERATION, -1, result]
    if equals == 3:  # "12 - 5 = 7 , so Zoe has 7 ."
        assert sentence[9] == sentence[4]
        facts[9] = result
    return facts


@pytest.mark.parametrize("seed", [0, 1])
def test_story_labels_are_the_copies_of_each_fact(seed: int) -> None:
    source = Examples(WORDS, "train", seed)
    for problem in islice(wp.problems("train", seed + 10), 150):
        example = source.example(problem.question, problem.answer, drill=False)
        words, last = problem.answer.split(), len(problem.steps) - 1
        wanted = [-1, NAME, -1, -1, -1, -1]  # the opening's number is given
        for number in range(len(problem.steps)):
            wanted += sentence_facts(words[len(wanted) :][:11], number - 1, number)
        wanted += [-1, NAME, -1, last, -1, -1, -1, -1, last]
        wanted += [-1] * (example.canvas - len(wanted))
        assert example.fact == [-1] * example.prompt + wanted
        for token, fact in zip(example.tokens, example.fact, strict=True):
            assert not 0 <= fact < NAME or WORDS.decode([token]) == f" {problem.steps[fact].after}"


def test_drill_labels_are_the_copies_of_each_result() -> None:
    source = Examples(WORDS, "train", 3)
    for _ in range(150):
        example = source.drill()
        body = WORDS.decode(example.tokens[example.prompt : example.prompt + 55]).split()
        wanted = []
        for number in range(5):
            sentence = body[11 * number : 11 * (number + 1)]
            equals = sentence.index("=")
            before, operator, operand, _, after = sentence[equals - 3 : equals + 2]
            assert wp.APPLY[operator](int(before), int(operand)) == int(after)
            wanted += sentence_facts(sentence, -1, number)  # its first term is a number of its own
        assert example.fact == [-1] * example.prompt + wanted + [-1] * (example.canvas - 55)


def test_a_story_hides_whole_facts() -> None:
    """Often all statements of a result are hidden while much else is seen: it cannot be copied, only computed."""
    alone = 0
    for seed in range(20):
        examples, batch = batch_of(seed, 128)
        for row, e in enumerate(examples):
            masked = batch.inputs[row, : len(e.fact)] == MASK
            facts = np.array(e.fact)
            whole = all(masked[facts == fact].all() for fact in set(facts[masked & (facts >= 0)].tolist()))
            alone += not e.drill and masked.any() and not masked[facts < 0].any() and whole
    assert alone > 20


def test_a_fifth_of_the_stories_keep_a_left_part_whose_next_token_weighs_most() -> None:
    left = stories = 0
    for seed in range(40):
        examples, batch = batch_of(seed, 128)
        for row, e in enumerate(examples):
            if e.drill:
                continue
            stories += 1
            body = slice(e.prompt, e.prompt + e.canvas)
            masked, weights = batch.inputs[row, body] == MASK, batch.weights[row, body]
            first = int(masked.argmax())
            if masked.any() and masked[first:].all() and 0 < first < e.canvas - 16 and not masked[:first].any():
                left += 1
                facts, tokens = np.array(e.fact[body]), np.array(e.tokens[body])
                like = (facts < 0) & (tokens != EOS)  # weighed once, but for the first
                block = [i for i in range(first + 1, -(-(first + 1) // 16) * 16) if like[i]]
                if like[first] and block:
                    assert weights[first] >= 3.9 * weights[block[0]]
    assert 0.1 < left / stories < 0.25


def test_examples_are_what_the_chat_template_and_the_tokenizer_make() -> None:
    source = Examples(WORDS, "train", 0)
    for problem in islice(wp.problems("train", 10), 100):
        example = source.example(problem.question, problem.answer, drill=False)
        text = f"{tokenizer.prompt_text(problem.question)} {problem.answer}"
        tokens = WORDS.encode(text, add_special_tokens=False)
        assert example.tokens[: len(tokens)] == tokens
        filler = example.tokens[len(tokens) :]
        assert filler
        assert set(filler) == {EOS}
        assert example.prompt == len(WORDS.encode(tokenizer.prompt_text(problem.question)))
        assert example.canvas % UNIT == 0
        assert example.canvas <= 64


def test_sources_repeat_by_seed_and_keep_to_their_split() -> None:
    streams = [
        [e.tokens for e in (source.story(), source.drill(), source.story())]
        for source in (Examples(WORDS, "train", 0), Examples(WORDS, "train", 0), Examples(WORDS, "train", 1))
    ]
    assert streams[0] == streams[1]
    assert streams[0] != streams[2]
    source = Examples(WORDS, "held_out", 0)
    for _ in range(50):
        example = source.story()
        body = WORDS.decode(example.tokens[example.prompt :]).replace(tokenizer.EOS, "").split()
        equations = [body[i - 3 : i] for i, w in enumerate(body) if w == "="]
        signature = equations[0][0] + "".join(operator + operand for _, operator, operand in equations)
        assert wp.split_of(signature) == "held_out"
