"""The launch scripts without a cluster: what they would start, and where they can be started."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = [ROOT / "launch" / f"{name}.sh" for name in ("gsm8k", "math", "humaneval", "mbpp", "batch")]
OUTSIDE = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}


def started(script: Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A script, asked what it would run."""
    command = ["bash", str(script), "--dry-run", "model.path=m", "task.input=p.jsonl"]
    return subprocess.run(command, cwd=cwd, env=OUTSIDE | environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_dry_run_prints_the_command(script: Path, tmp_path: Path) -> None:
    ran = started(script, tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert f"in {ROOT}, with OMP_NUM_THREADS=" in ran.stdout
    assert "model.path=m task.input=p.jsonl" in ran.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_job_that_was_submitted_elsewhere_says_where_to_submit_it(script: Path, tmp_path: Path) -> None:
    """Slurm runs a copy of the script, which knows the checkout by the folder of sbatch only."""
    ran = started(script, tmp_path, SLURM_SUBMIT_DIR=str(tmp_path))
    assert ran.returncode == 1
    assert "run sbatch in the checkout of lopa_dist" in ran.stderr
