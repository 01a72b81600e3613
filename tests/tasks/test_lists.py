"""List problems: every right answer counts and no other does; the split and the streams hold still."""

from __future__ import annotations

import random
from itertools import islice, permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lopa_dist.composing import composed
from lopa_dist.config import TaskConfig
from lopa_dist.tasks import list_problems as lp
from lopa_dist.tasks.embedded import Lists
from lopa_dist.tasks.registry import make_task
from lopa_dist.tasks.word_problems import HELD_OUT_SHARE, Split, split_of
from training.vocabularies import list_words

SPLITS: tuple[Split, ...] = ("train", "held_out")
seeds = st.integers(0, 2**32 - 1)
quick = settings(max_examples=60, deadline=None)


def some(split: Split, seed: int = 0, count: int = 400) -> list[lp.ListProblem]:
    return list(islice(lp.problems(split, seed), count))


@given(seed=seeds, family=st.sampled_from(lp.FAMILIES))
@quick
def test_the_answer_of_a_problem_is_right(seed: int, family: str) -> None:
    problem = lp.random_problem(random.Random(seed), family)
    assert problem.family == family
    assert lp.is_right(problem.question, problem.answer)
    assert lp.is_right(problem.question, f" {problem.answer} ")
    assert set(f"{problem.question} {problem.answer}".split()) <= set(list_words())
    assert len(problem.answer.split()) <= lp.LONGEST + 1


@given(seed=seeds, family=st.sampled_from(lp.FAMILIES), data=st.data())
@quick
def test_an_answer_with_a_token_lost_doubled_or_changed_is_wrong(seed: int, family: str, data: st.DataObject) -> None:
    """A changed token is one that was not in the question, so that no other right answer comes of it."""
    problem = lp.random_problem(random.Random(seed), family)
    words = problem.answer.split()
    i = data.draw(st.integers(0, len(words) - 1))
    other = "e" if family == "latin" else "100"
    for broken in (words[:i] + words[i + 1 :], [*words[: i + 1], *words[i:]], [*words[:i], other, *words[i + 1 :]]):
        assert not lp.is_right(problem.question, " ".join(broken))


@pytest.mark.parametrize(
    ("question", "right"),
    [
        ("copy : 5 9 7", {"5 9 7"}),
        ("reverse : 5 9 7", {"7 9 5"}),
        ("sort : 5 9 7", {"5 7 9"}),
        ("shuffle : 5 9 7", {"5 7 9", "5 9 7", "7 5 9", "7 9 5", "9 5 7", "9 7 5"}),
        ("insert 1 anywhere : 5 9 7", {"1 5 9 7", "5 1 9 7", "5 9 1 7", "5 9 7 1"}),
        ("remove any : 5 9 7", {"9 7", "5 7", "5 9"}),
        ("replace any by 1 : 5 9 7", {"1 9 7", "5 1 7", "5 9 1"}),
    ],
)
def test_exactly_the_right_lists_are_right(question: str, right: set[str]) -> None:
    """Of all lists of up to four of the numbers at hand."""
    lists = [" ".join(items) for n in range(5) for items in product("1579", repeat=n)]
    assert {text for text in lists if lp.is_right(question, text)} == right


@given(seed=seeds)
@settings(max_examples=15, deadline=None)
def test_exactly_the_latin_squares_with_the_given_cells_are_right(seed: int) -> None:
    question = lp.latin(random.Random(seed)).question
    given_rows = [row.split() for row in question.removeprefix("complete : ").split("/")]
    fitting = [
        [row for row in permutations("abcd") if all(g in ("_", c) for g, c in zip(known, row, strict=True))]
        for known in given_rows
    ]
    for rows in islice(product(*fitting), 3000):
        latin = all(len(set(column)) == 4 for column in zip(*rows, strict=True))
        assert lp.is_right(question, " / ".join(" ".join(row) for row in rows)) == latin


@given(seed=seeds, order=st.randoms(use_true_random=False))
@quick
def test_every_permutation_is_a_shuffle(seed: int, order: random.Random) -> None:
    problem = lp.random_problem(random.Random(seed), "shuffle")
    items = problem.answer.split()
    order.shuffle(items)
    assert lp.is_right(problem.question, " ".join(items))
    if len(items) > 1:
        assert not lp.is_right(problem.question, " ".join([*items[:-1], items[0]]))


@pytest.mark.parametrize("text", ["", " ", ",", "5", "5, 9, 7", "5 9 7 .", "five 9 7", "5.0 9 7", "-5 9 7", "٥ 9 7"])
def test_text_that_is_no_list_is_wrong(text: str) -> None:
    assert not lp.is_right("copy : 5 9 7", text)


@pytest.mark.parametrize("text", ["", "a b c d", "/ / /", "a b c d / b a d c / c d a b / d c b a /", "abcd / badc"])
def test_text_that_is_no_square_is_wrong(text: str) -> None:
    blank = " / ".join(["_ _ _ _"] * 4)
    assert lp.is_right(f"complete : {blank}", "a b c d / b a d c / c d a b / d c b a")
    assert not lp.is_right(f"complete : {blank}", text)


@pytest.mark.parametrize("split", SPLITS)
def test_families_take_turns_and_lists_have_the_promised_lengths(split: Split) -> None:
    problems = some(split, count=2400)
    assert [p.family for p in problems] == list(lp.FAMILIES) * 300
    counted = [(p.family, len(p.question.partition(" : ")[2].split())) for p in problems if p.family != "latin"]
    for longest in (True, False):
        lengths = [n for family, n in counted if (family in lp.LONG_FAMILIES) == longest]
        kinds = [wanted for kind, wanted in lp.LENGTHS.items() if longest or kind != "longest"]
        for wanted in kinds:
            assert sum(n in wanted for n in lengths) / len(lengths) == pytest.approx(1 / len(kinds), abs=0.06)
        assert min(lengths) >= 3
        assert max(lengths) == kinds[-1][-1]
    for problem in problems:
        items = problem.question.partition(" : ")[2].split()
        assert problem.family == "latin" or len(set(items)) == len(items)
        assert problem.family == "latin" or not set(problem.question.partition(" : ")[0].split()) & set(items)


def test_every_place_is_equally_likely() -> None:
    rng = random.Random(0)
    answers = [lp.list_problem(rng, "insert", 3) for _ in range(2000)]
    indices = [p.answer.split().index(p.question.split()[1]) for p in answers]
    assert [indices.count(i) / 2000 for i in range(4)] == pytest.approx([0.25] * 4, abs=0.04)


def test_there_are_576_squares() -> None:
    assert len(set(lp.SQUARES)) == len(lp.SQUARES) == 576
    for cells in lp.SQUARES:
        lines = [cells[i : i + 4] for i in range(0, 16, 4)] + [cells[i::4] for i in range(4)]
        assert [len(set(line)) for line in lines] == [4] * 8


@given(seed=seeds)
@quick
def test_a_square_with_a_cell_that_was_given_otherwise_is_wrong(seed: int) -> None:
    rng = random.Random(seed)
    problem = lp.latin(rng)
    cells = rng.choice(lp.SQUARES)
    known = problem.question.removeprefix("complete : ").replace("/", "").split()
    fits = all(g in ("_", c) for g, c in zip(known, cells, strict=True))
    assert lp.is_right(problem.question, lp.grid(cells)) == fits


def test_the_split_is_disjoint_and_a_twentieth_is_held_out() -> None:
    rng = random.Random(0)
    questions = {lp.random_problem(rng, family).question for _ in range(700) for family in lp.FAMILIES}
    share = sum(split_of(q) == "held_out" for q in questions) / len(questions)
    assert share == pytest.approx(1 / HELD_OUT_SHARE, abs=0.01)
    for split in SPLITS:
        assert {split_of(p.question) for p in some(split)} == {split}


def test_the_split_never_moves() -> None:
    held_out = [q for n in range(100) if split_of(q := f"copy : {n} 50 99") == "held_out"]
    assert held_out == [f"copy : {n} 50 99" for n in (16, 31, 66, 95, 99)]


def test_problems_follow_from_split_and_seed() -> None:
    assert some("train", 5, 50) == some("train", 5, 50)
    streams = [tuple(p.question for p in some(split, seed, 20)) for split in SPLITS for seed in (0, 1, 2)]
    assert len(set(streams)) == 6


def test_the_task_gives_different_problems_and_judges_them() -> None:
    task = Lists(64, "held_out", 1)
    items, problems = list(task.items()), some("held_out", 1, 64)
    assert len({i.custom_id for i in items}) == len({i.reference for i in items}) == 64
    for item, problem in zip(items, problems, strict=True):
        assert item.messages == [{"role": "user", "content": problem.question}]
        assert item.custom_id.endswith(f"-{problem.family}")
        assert task.score(item, problem.answer).correct
        assert task.score(item, "").expected == problem.answer
        assert not task.score(item, "").correct
    assert items == list(task.items())


def test_a_job_makes_the_task() -> None:
    task = make_task(composed(["task=lists", "task.limit=3", "task.problem_seed=2"]).task)
    assert isinstance(task, Lists)
    assert (task.limit, task.split, task.seed) == (3, "held_out", 2)
    with pytest.raises(ValueError, match="limit"):
        TaskConfig(name="lists", limit=None)
