"""MATH: the four examples, and mathematical equality."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("math_verify", reason="needs math-verify: pip install 'lopa_dist[eval]'")

from lopa_dist.tasks.minerva_math import MinervaMath
from lopa_dist.tasks.task import Cancelled, Score, SlowTask
from lopa_dist.tasks.worker import Lost, TooLong

ROWS = [
    {"problem": "Half of one?", "level": "Level 1", "type": "Algebra", "solution": r"It is $\boxed{\frac{1}{2}}$."},
    {"problem": "Where?", "level": "Level 2", "type": "Algebra", "solution": r"On $\boxed{[2,5)}$."},
    {"problem": "Root?", "level": "Level 2", "type": "Algebra", "solution": r"$\boxed{2\sqrt{3}}$"},
    {"problem": "Column?", "level": "Level 2", "type": "Geometry",
     "solution": r"$\boxed{\begin{pmatrix}1\\2\end{pmatrix}}$"},
    {"problem": "Day?", "level": "Level 1", "type": "Prealgebra", "solution": r"$\boxed{\text{Tuesday}}$"},
    {"problem": "Many?", "level": "Level 1", "type": "Prealgebra", "solution": r"$\boxed{1,000,000}$"},
]  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("math") / "math.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(file)


def test_gold_solutions_score_and_other_answers_do_not(source: str) -> None:
    task = MinervaMath(source)
    items = list(task.items())
    assert len(items) == len(ROWS)
    for item, row in zip(items, ROWS, strict=True):
        assert task.score(
            item, f" {row['solution']}\nFinal Answer: The final answer is it. I hope it is correct."
        ).correct
        for text in (r"Final Answer: The final answer is $123456$. I hope it is correct.", "", "I do not know."):
            assert not task.score(item, text).correct


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "Final Answer: The final answer is $0.5$. I hope it is correct."),
        (0, "The answer is 1/2."),
        (2, r"$\sqrt{12}$"),
        (5, "Final Answer: The final answer is $1000000$."),
    ],
)
def test_other_ways_to_write_the_answer(source: str, number: int, text: str) -> None:
    task = MinervaMath(source)
    score = task.score(list(task.items())[number], text)
    assert score.correct
    assert score.extracted


def test_it_is_judged_beside_decoding_and_what_takes_too_long_is_wrong(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = MinervaMath(source)
    assert isinstance(task, SlowTask)

    def lost(question: object) -> None:
        raise failure

    item = next(iter(task.items()))
    with monkeypatch.context() as patch:
        patch.setattr(task.workers, "ask", lost)
        failure: Lost = TooLong("took more than 60 s")
        assert task.score(item, "1/2") == Score(False, None, reason="math-verify took more than 60 s")
        failure = Lost("ended with status -9")
        with pytest.raises(Lost, match="status -9"):
            task.score(item, "1/2")
    assert task.score(item, "1/2").correct
    task.cancel()
    with pytest.raises(Cancelled):
        task.score(item, "1/2")


def test_prompt(source: str) -> None:
    item = next(iter(MinervaMath(source).items()))
    assert item.prompt.startswith(
        "Problem:\nFind the domain of the expression  $\\frac{\\sqrt{x-2}}{\\sqrt{5-x}}$.\n\nSolution: "
    )
    assert item.prompt.count("I hope it is correct.\n\nProblem:\n") == 4
    assert item.prompt.endswith("Problem:\nHalf of one?\n\nSolution:")
    assert len(item.messages) == 9
    assert item.stop == ("Problem:",)


def test_original_folder_of_files(tmp_path: Path) -> None:
    """MATH is distributed as one JSON file a problem."""
    for i, row in enumerate(ROWS[:3]):
        (tmp_path / row["type"].lower()).mkdir(exist_ok=True)
        (tmp_path / row["type"].lower() / f"{i}.json").write_text(json.dumps(row, indent=2))
    (tmp_path / "algebra" / "9.json").write_text(json.dumps({"problem": "?", "solution": "no box"}))
    items = list(MinervaMath(str(tmp_path), fewshot=0).items())
    assert [item.error is None for item in items] == [True, True, True, False]
    assert "boxed" in str(items[3].error)
