"""Jobs of two ranks that learn on their way: the texts of one that never learns, also when a rank is lost meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.system.conftest import QUIET, Lines, alone

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

JOB = ["model=causal", "task.limit=24", "decode.drafts=4", "engine.max_sequences=8"]
LEARNING = [*JOB, "job.learn=8", "learn.minutes=0.03", "learn.rank=4", "parallel.timeout_s=20"]
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def never(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    return alone(tmp_path_factory.mktemp("never"), *JOB)


def command(launcher: str, *overrides: str) -> list[str]:
    if launcher == "mpirun":
        return [str(BIN / "mpirun"), "-n", "2", sys.executable, "-m", "lopa_dist", *QUIET, *overrides]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    return [*torchrun, "-m", "lopa_dist", *QUIET, *overrides]


def texts(lines: Lines) -> list[str]:
    return [line["text"] for line in lines]


def results(folder: Path) -> Lines:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


ENVIRONMENT: dict[str, Any] = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(("launcher", "mesh"), [("torchrun", "parallel.tensor=2"), ("mpirun", "parallel.branch=2")])
def test_two_ranks_learn_together(tmp_path: Path, never: Lines, launcher: str, mesh: str) -> None:
    if launcher == "mpirun" and not (BIN / "mpirun").exists():
        pytest.skip("there is no mpirun beside this interpreter")
    job = command(launcher, f"hydra.run.dir={tmp_path}", mesh, *LEARNING)
    done = subprocess.run(job, capture_output=True, text=True, timeout=300, env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert texts(results(tmp_path)) == texts(never)
    [lesson] = json.loads((tmp_path / "report.json").read_text())["lessons"]
    assert lesson["steps"] > 0
    assert not lesson["problem"]


def test_a_rank_that_is_lost_in_a_lesson_costs_no_answer(tmp_path: Path, never: Lines) -> None:
    job = command("torchrun", f"hydra.run.dir={tmp_path}", "parallel.data=2", *LEARNING, "learn.minutes=5")
    with subprocess.Popen(job, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT) as running:
        assert running.stdout
        said = ""
        while "learns to draft" not in said:
            line = running.stdout.readline()
            assert line, said[-3000:]
            said += line
        found = subprocess.run(["pgrep", "-f", f"hydra.run.dir={tmp_path}"], capture_output=True, text=True, check=True)
        of_rank_1 = [
            int(process) for process in found.stdout.split() if int(process) != running.pid and rank_of(process) == "1"
        ]
        assert of_rank_1
        os.kill(of_rank_1[0], signal.SIGKILL)
        assert running.wait(120) != 0
    job = command("torchrun", f"hydra.run.dir={tmp_path}", "parallel.data=2", *LEARNING)
    done = subprocess.run(job, capture_output=True, text=True, timeout=300, env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert texts(results(tmp_path)) == texts(never)
    assert json.loads((tmp_path / "report.json").read_text())["attempts"] == 2


def rank_of(process: str) -> str | None:
    """The RANK of a process, if torchrun gave it one."""
    variables = (Path("/proc") / process / "environ").read_bytes().split(b"\0")
    return next((entry[5:].decode() for entry in variables if entry.startswith(b"RANK=")), None)
