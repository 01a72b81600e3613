"""Jobs of two ranks that learn on their way: the texts of one that never learns, also when a rank is lost meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.system import forked
from tests.system.conftest import QUIET, Lines, alone, results

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

JOB = ["model=causal", "task.limit=24", "decode.drafts=4", "engine.max_sequences=8"]
LEARNING = [*JOB, "job.learn=8", "learn.minutes=0.03", "learn.rank=4", "parallel.timeout_s=20"]
MPIRUN = Path(sys.executable).parent / "mpirun"


@pytest.fixture(scope="module")
def never(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    return alone(tmp_path_factory.mktemp("never"), *JOB)


def texts(lines: Lines) -> list[str]:
    return [line["text"] for line in lines]


def test_two_ranks_learn_together_under_mpirun(tmp_path: Path, never: Lines) -> None:
    if not MPIRUN.exists():
        pytest.skip("there is no mpirun beside this interpreter")
    job = [str(MPIRUN), "-n", "2", sys.executable, "-m", "lopa_dist", *QUIET, f"hydra.run.dir={tmp_path}"]
    done = subprocess.run(
        [*job, "parallel.branch=2", *LEARNING], capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    learned(tmp_path, never)


def test_two_tensor_ranks_learn_together(tmp_path: Path, never: Lines) -> None:
    ranks = forked.job(tmp_path / "run", 2, "parallel.tensor=2", *LEARNING)
    assert ranks.wait() == [0, 0], ranks.printed()[-3000:]
    learned(tmp_path / "run", never)


def learned(folder: Path, never: Lines) -> None:
    """The job had a lesson, and has the texts of one that never learns."""
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
