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


def job(folder: Path, ranks: int, *overrides: str) -> list[dict[str, Any]]:
    """Run and return the result lines."""
    launcher = [sys.executable, "-m"]
    if ranks > 1:
        launcher += ["torch.distributed.run", "--nproc-per-node", str(ranks), "-m"]
    command = [
        *launcher, "lopa_dist", f"hydra.run.dir={folder}", "logging.wandb.mode=disabled",
        "logging.plots=false", "parallel.threads=1", *overrides,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


SETTINGS = {
    "full and greedy": ("decode.branches=3", "task.limit=100"),
    "full, split weights": ("decode.branches=3", "task.limit=12"),  # gathers in every layer: slow here
    "block-causal and sampled": (
        "decode.branches=3", "task.limit=24", "decode.window_attention=block_causal", "decode.prompt_attention=self",
        "decode.temperature=0.8", "decode.top_p=0.95",
    ),
}  # fmt: skip
MESHES = {
    "full and greedy": [(1, 4, 1)],
    "full, split weights": [(1, 2, 2)],
    "block-causal and sampled": [(1, 2, 1), (1, 1, 2), (2, 1, 1)],
}
"""Data x branch x tensor; tests/engine/test_loop.py has all of them under all settings, with threads for ranks."""


@pytest.mark.parametrize("name", SETTINGS)
def test_same_text_at_any_world_size(tmp_path: Path, name: str) -> None:
    alone = job(tmp_path / "alone", 1, *SETTINGS[name])
    assert f"task.limit={len(alone)}" in SETTINGS[name]
    for data, branch, tensor in MESHES[name]:
        folder, ranks = tmp_path / f"{data}{branch}{tensor}", data * branch * tensor
        axes = (f"parallel.data={data}", f"parallel.branch={branch}", f"parallel.tensor={tensor}")
        for one, other in zip(alone, job(folder, ranks, *SETTINGS[name], *axes), strict=True):
            assert one["text"] == other["text"]
            assert one["usage"] == other["usage"]
        report = json.loads((folder / "report.json").read_text())
        assert report["world"] == {
            "size": ranks, "data": data, "branch": branch, "tensor": tensor, "backend": "gloo", "launcher": "torchrun",
        }  # fmt: skip
        sent = report["comm_bytes_per_step"]
        assert (sent["all_gather"] > 0) == (branch > 1)
        assert (sent["commit"] > 0) == (branch > 1 and "full" in name)
        assert (sent["tensor"] > 0) == (tensor > 1)


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
