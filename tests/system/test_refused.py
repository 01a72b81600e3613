"""A job that is refused changes nothing of what a run folder says of itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lopa_dist.commands import perform

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]


def job(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a small job to its end."""
    always = (f"hydra.run.dir={folder}", "logging.wandb.mode=disabled", "parallel.threads=1", "decode.max_new_tokens=8")
    return subprocess.run(
        [sys.executable, "-m", "lopa_dist", *always, *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_the_command_of_a_run_is_that_of_its_job(tmp_path: Path) -> None:
    assert job(tmp_path, "task.limit=2").returncode == 0
    refused = job(tmp_path, "task.limit=2", "decode.temperature=0.7")
    assert "has results of other settings" in refused.stderr
    perform("report", [str(tmp_path)])
    page = (tmp_path / "report.html").read_text()
    assert "lopa-dist logging.wandb.mode=disabled" in page
    assert "decode.temperature=0.7" not in page
