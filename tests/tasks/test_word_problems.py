"""The word problems compute right, keep to their ranges and their split, and repeat by seed."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from itertools import islice, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lopa_dist.tasks import word_problems as wp
from lopa_dist.tasks.word_problems import Operation, WordProblem
from training.vocabularies import problem_words

SPLITS: tuple[wp.Split, ...] = ("train", "held_out")


def some(split: wp.Split, seed: int = 0, count: int = 400) -> list[WordProblem]:
    return list(islice(wp.problems(split, seed), count))


def sentences(problem: WordProblem) -> list[list[str]]:
    """The answer cut where its sentences should end: opening, one a step, closing, `#### N`."""
    words, n = problem.answer.split(" "), len(problem.steps)
    cuts = [0, *(6 + 11 * i for i in range(n + 1)), 6 + 11 * n + 7, len(words)]
    return [words[a:b] for a, b in pairwise(cuts)]


@given(st.integers(0, 2**32), st.integers(1, 40))
def test_drawing_draws_as_random_choice_does(seed: int, count: int) -> None:
    values, ours, python = range(100, 100 + count), random.Random(seed), random.Random(seed)
    draw = wp.drawing(values)
    assert [draw(ours.getrandbits) for _ in range(20)] == [python.choice(values) for _ in range(20)]


def test_the_problems_never_change() -> None:
    text = "\n".join(f"{p.question} {p.answer}" for p in (*some("held_out", 1), *some("train", 2)))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "e0a364293a9e7a38"


@pytest.mark.parametrize(("operator", "result"), [("+", 17), ("-", 7), ("x", 60)])
def test_apply(operator: str, result: int) -> None:
    assert wp.APPLY[operator](12, 5) == result


@pytest.mark.parametrize("split", SPLITS)
def test_arithmetic_is_right_and_in_range(split: wp.Split) -> None:
    counts = set()
    for problem in some(split):
        assert problem.steps[0].before in wp.START_RANGE
        counts.add(len(problem.steps))
        value = problem.steps[0].before
        for step in problem.steps:
            assert step.before == value
            right = {"+": value + step.operand, "-": value - step.operand, "x": value * step.operand}
            value = right[step.operator]
            assert step.after == value
            assert 1 <= value <= 50
            assert step.operand in (wp.FACTORS if step.operator == "x" else wp.ADDEND_RANGE)
        assert problem.result == value
    assert counts == {2, 3, 4}


@pytest.mark.parametrize("split", SPLITS)
def test_answers_have_the_promised_lengths(split: wp.Split) -> None:
    for problem in some(split):
        opening, *steps, closing, result = sentences(problem)
        assert len(problem.answer.split()) == 15 + 11 * len(problem.steps)
        assert [s[-1] for s in (opening, *steps, closing)] == ["."] * (len(problem.steps) + 2)
        assert opening[3] == str(problem.steps[0].before)
        assert closing[3] == str(problem.result)
        assert result == ["####", str(problem.result)]
        for step, sentence in zip(problem.steps, steps, strict=True):
            equals = sentence.index("=")
            equation = [str(step.before), step.operator, str(step.operand), "=", str(step.after)]
            assert sentence[equals - 3 : equals + 2] == equation


def test_every_wording_of_a_step_has_11_tokens() -> None:
    rng, forms = random.Random(0), set()
    for _ in range(300):
        sentence = wp.word_step(rng, Operation(12, "-", 5, 7), "Zoe").split(" ")
        assert len(sentence) == 11
        forms.add((sentence.index("="), "Zoe" in sentence, sentence.count("7")))
    assert forms == {(6, True, 1), (6, False, 1), (3, True, 2)}


def test_questions_tell_the_story() -> None:
    for problem in some("train"):
        numbers = [int(w) for w in problem.question.split() if w.isdigit()]
        assert numbers == [problem.steps[0].before, *(s.operand for s in problem.steps)]
        assert problem.question.endswith("?")
        assert "{" not in problem.question + problem.answer
        name = problem.answer.split()[1]
        (obj,) = set(wp.OBJECTS) & set(problem.question.split())
        assert name in wp.NAMES
        assert name in problem.question.split()
        assert not (set(wp.NAMES) - {name}) & set(problem.question.split() + problem.answer.split())
        assert obj not in problem.answer.split()


def test_signatures() -> None:
    steps = (Operation(7, "+", 3, 10), Operation(10, "x", 2, 20), Operation(20, "-", 12, 8))
    assert wp.signature(steps) == "7+3x2-12"
    assert wp.word_problem(random.Random(0), steps).steps == steps


def test_the_split_is_disjoint_by_signature() -> None:
    train = {wp.signature(p.steps) for seed in range(3) for p in some("train", seed)}
    held_out = {wp.signature(p.steps) for seed in range(3) for p in some("held_out", seed)}
    assert len(train) > 300
    assert len(held_out) > 100
    assert not train & held_out
    assert {wp.split_of(s) for s in train} == {"train"}
    assert {wp.split_of(s) for s in held_out} == {"held_out"}


def test_one_signature_in_twenty_is_held_out() -> None:
    rng = random.Random(0)
    signatures = {wp.signature(wp.random_steps(rng)) for _ in range(6000)}
    share = sum(wp.split_of(s) == "held_out" for s in signatures) / len(signatures)
    assert share == pytest.approx(1 / 20, abs=0.012)


def test_the_split_never_moves() -> None:
    held_out = [s for a in range(2, 16) for b in range(2, 13) if wp.split_of(s := f"{a}+{b}x2") == "held_out"]
    assert " ".join(held_out) == "3+3x2 3+4x2 3+9x2 6+4x2 10+5x2 10+6x2 10+7x2 10+9x2 11+5x2 12+8x2 14+10x2"


def test_problems_follow_from_split_and_seed() -> None:
    assert some("train", 5, 50) == some("train", 5, 50)
    streams = [tuple(p.question for p in some(split, seed, 20)) for split in SPLITS for seed in (0, 1, 2)]
    assert len(set(streams)) == 6


def test_problems_are_the_same_in_another_process() -> None:
    code = (
        "from itertools import islice; from lopa_dist.tasks.word_problems import problems\n"
        "for p in islice(problems('held_out', 2), 30): print(p.question, p.answer)"
    )
    root = Path(__file__).parents[2]
    out = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env=os.environ | {"PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.splitlines() == [f"{p.question} {p.answer}" for p in some("held_out", 2, 30)]


def test_the_vocabulary_covers_every_word() -> None:
    words = problem_words()
    assert words == sorted(set(words))
    assert all(w and " " not in w and "{" not in w for w in words)
    assert {str(n) for n in range(100)} <= set(words)
    for split in SPLITS:
        for problem in some(split):
            assert set(problem.question.split(" ") + problem.answer.split(" ")) <= set(words)
