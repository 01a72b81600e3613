"""Jobs of two ranks that learn on their way: the texts of one that never learns, also when a rank is lost meanwhile."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.system import forked
from tests.system.conftest import Lines, alone, results

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

# of its first eight prompts, two are held out of lessons
JOB = ["model=causal", "task.limit=24", "task.problem_seed=22", "decode.drafts=4", "engine.max_sequences=8"]
LEARNING = [*JOB, "job.learn=8", "learn.minutes=0.03", "learn.rank=4", "parallel.timeout_s=20"]


@pytest.fixture(scope="module")
def never(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    return alone(tmp_path_factory.mktemp("never"), *JOB)


def texts(lines: Lines) -> list[str]:
    return [line["text"] for line in lines]


@pytest.mark.parametrize("axis", ["branch", "tensor"])
def test_two_ranks_learn_together(tmp_path: Path, never: Lines, axis: str) -> None:
    folder = tmp_path / "run"
    ranks = forked.job(folder, 2, f"parallel.{axis}=2", *LEARNING)
    assert ranks.wait() == [0, 0], ranks.printed()[-3000:]
    assert texts(results(folder)) == texts(never)
    [lesson] = json.loads((folder / "report.json").read_text())["lessons"]
    assert lesson["steps"] > 0
    assert not lesson["problem"]


def test_a_rank_that_is_lost_in_a_lesson_costs_no_answer(tmp_path: Path, never: Lines) -> None:
    folder = tmp_path / "run"
    ranks = forked.job(folder, 2, "parallel.data=2", *LEARNING, "learn.minutes=5", "parallel.timeout_s=6")
    end = time.monotonic() + 120
    while "learns to draft" not in ranks.printed() and ranks.running() and time.monotonic() < end:
        time.sleep(0.05)
    assert "learns to draft" in ranks.printed(), ranks.printed()[-3000:]
    ranks.processes[1].kill()
    assert all(ranks.wait(120)), "rank 0 ends by itself"
    assert "rank 1 of 2 does not answer" in ranks.printed(), ranks.printed()[-3000:]
    ranks = forked.job(folder, 2, "parallel.data=2", *LEARNING)
    assert ranks.wait() == [0, 0], ranks.printed()[-3000:]
    assert texts(results(folder)) == texts(never)
    assert json.loads((folder / "report.json").read_text())["attempts"] == 2
