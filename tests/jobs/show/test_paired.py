"""Differences on the same problems, against the test as one works it out by listing all coin tosses."""

from __future__ import annotations

import json
from itertools import product
from math import comb
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lopa_dist.jobs.show.paired import compared, least_splits, verdicts
from lopa_dist.jobs.show.seed_groups import SeedGroup, differences


def test_many_differences_are_counted_exactly() -> None:
    for most in (0, 1, 20):
        assert least_splits(40, most) == sum(comb(40, i) for i in range(most + 1))
    assert 2 * least_splits(20_001, 10_000) == 2**20_001


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=9))
def test_mcnemar_s_exact_test_is_that_of_all_coin_tosses(answers: list[tuple[bool, bool]]) -> None:
    found = compared(
        {str(i): float(a) for i, (a, _) in enumerate(answers)}, {str(i): float(b) for i, (_, b) in enumerate(answers)}
    )
    assert found
    better, worse = answers.count((True, False)), answers.count((False, True))
    assert (found.better, found.worse, found.problems) == (better, worse, len(answers))
    tosses = [sum(toss) for toss in product((0, 1), repeat=better + worse)]
    middle = (better + worse) / 2
    p = sum(abs(heads - middle) >= abs(better - middle) for heads in tosses) / len(tosses)
    assert found.p == pytest.approx(p)
    assert found.difference == pytest.approx((better - worse) / len(answers))
    # half a problem in each of the four cells (Agresti and Min)
    n, b, c = len(answers) + 2, better + 0.5, worse + 0.5
    half = 1.96 * ((b + c) - (b - c) ** 2 / n) ** 0.5 / n
    assert found.low == pytest.approx(max(-1, (b - c) / n - half))
    assert found.high == pytest.approx(min(1, (b - c) / n + half))


def test_only_problems_that_both_have_count() -> None:
    assert compared({"a": 1.0}, {"b": 1.0}) is None
    found = compared({"a": 1.0, "c": 0.0}, {"a": 0.0, "b": 1.0})
    assert found
    assert (found.problems, found.difference) == (1, 1.0)


def test_verdicts_of_seeds_are_their_means(tmp_path: Path) -> None:
    for name, correct in (("x", [True, None]), ("y", [False, False])):
        (tmp_path / name).mkdir()
        lines = [
            {"custom_id": str(i), "index": i, "finish_reason": "stop", "correct": right}
            for i, right in enumerate(correct)
        ]
        (tmp_path / name / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert verdicts([tmp_path / "x", tmp_path / "y", tmp_path / "gone"]) == {"0": 0.5, "1": 0.0}


def test_runs_of_other_inputs_are_not_compared_problem_by_problem(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Names such as line-1 are the same in every file."""
    groups = []
    for name, hashed in (("base", "x"), ("same", "x"), ("other", "y")):
        (tmp_path / name).mkdir()
        line = {"custom_id": "line-1", "index": 0, "finish_reason": "stop", "correct": True}
        (tmp_path / name / "results.jsonl").write_text(json.dumps(line) + "\n")
        groups.append(SeedGroup(name, {"whole_input": hashed, "task": {}}, [tmp_path / name]))
    base, same, other = differences(groups, groups[0])
    assert (base, other) == (None, None)
    assert same is not None
    assert "other is not compared with base problem by problem: its input is another" in caplog.text
