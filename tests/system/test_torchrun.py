"""The main job under torchrun: the same text from 1 process, 2 ranks and 4 ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]
PROBLEMS = 100


def job(folder: Path, ranks: int, *overrides: str) -> list[dict[str, Any]]:
    """Run and return the result lines."""
    launcher = [sys.executable, "-m"]
    if ranks > 1:
        launcher += ["torch.distributed.run", "--nproc-per-node", str(ranks), "-m"]
    command = [
        *launcher, "lopa_dist", f"task.limit={PROBLEMS}", f"hydra.run.dir={folder}", "logging.wandb.mode=disabled",
        "logging.plots=false", "parallel.threads=1", f"parallel.branch={ranks}", *overrides,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "overrides",
    [("decode.branches=3",), ("decode.branches=3", "decode.temperature=0.8", "decode.top_p=0.95")],
    ids=["greedy", "sampled"],
)
def test_same_text_at_any_world_size(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    runs = {ranks: job(tmp_path / str(ranks), ranks, *overrides) for ranks in (1, 2, 4)}
    assert len(runs[1]) == PROBLEMS
    for ranks in (2, 4):
        for one, other in zip(runs[1], runs[ranks], strict=True):
            assert one["text"] == other["text"]
            assert one["usage"] == other["usage"]
        report = json.loads((tmp_path / str(ranks) / "report.json").read_text())
        assert report["world"] == {
            "size": ranks, "data": 1, "branch": ranks, "tensor": 1, "backend": "gloo", "launcher": "torchrun",
        }  # fmt: skip
        assert report["comm_bytes_per_step"]["commit"] > 0


def test_slurm_script_runs_the_same_job_without_slurm(tmp_path: Path) -> None:
    """`launch/gsm8k.sh` outside Slurm: two ranks on this machine, and a word on what it runs."""
    script = Path(__file__).parents[2] / "launch" / "gsm8k.sh"
    overrides = [
        "task.limit=4",
        f"hydra.run.dir={tmp_path}",
        "logging.wandb.mode=disabled",
        "logging.plots=false",
    ]
    environment = {**os.environ, "BIN": str(Path(sys.executable).parent)}
    done = subprocess.run(
        [script, *overrides], capture_output=True, text=True, timeout=200, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "no model= or model.path= given" in done.stdout
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 4
