"""The main job on ranks of torchrun, or forked like those: the same text from 2 and from 4 ranks as from 1 process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system import forked
from tests.system.conftest import Lines, alone, results

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]


SAMPLED = [
    "decode.branches=3", "task.limit=8", "decode.context=d2f_causal",
    "decode.temperature=0.8", "decode.top_p=0.95",
]  # fmt: skip


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    """8 requests with tokens drawn at random, and windows that see no later block."""
    return alone(tmp_path_factory.mktemp("sampled"), *SAMPLED)


def test_four_ranks_greedy(tmp_path: Path, lookahead: Lines) -> None:
    """Full windows, whose K/V the winner's rank sends; a few sequences at a time, so that others have to wait."""
    few = ["task.limit=12", "decode.branches=3", "engine.max_sequences=6", *axes(1, 4, 1)]
    ranks = forked.job(tmp_path / "run", 4, *few)
    assert not any(ranks.wait()), ranks.printed()[-3000:]
    compare(tmp_path / "run", lookahead, 1, 4, 1, *few)


@pytest.mark.parametrize(("data", "branch", "tensor"), [(1, 2, 2), (2, 1, 1)])
def test_ranks_sampled(tmp_path: Path, sampled: Lines, data: int, branch: int, tensor: int) -> None:
    ranks = forked.job(tmp_path / "run", data * branch * tensor, *SAMPLED, *axes(data, branch, tensor))
    assert not any(ranks.wait()), ranks.printed()[-3000:]
    compare(tmp_path / "run", sampled, data, branch, tensor, *SAMPLED)


def axes(data: int, branch: int, tensor: int) -> list[str]:
    return [f"parallel.data={data}", f"parallel.branch={branch}", f"parallel.tensor={tensor}"]


def compare(folder: Path, alone: Lines, data: int, branch: int, tensor: int, *overrides: str) -> None:
    """Data x branch x tensor; tests/engine/test_loop.py has all of them under all settings, with threads for ranks."""
    ranks = data * branch * tensor
    found = results(folder)
    assert f"task.limit={len(found)}" in overrides
    for one, other in zip(alone, found, strict=False):
        assert one["text"] == other["text"]
        assert one["usage"] == other["usage"]
    report = json.loads((folder / "report.json").read_text())
    assert report["world"] == {
        "size": ranks, "data": data, "branch": branch, "tensor": tensor, "backend": "gloo", "launcher": "torchrun",
    }  # fmt: skip
    sent = report["comm_bytes_per_step"]
    assert (sent["all_gather"] > 0) == (branch > 1)
    assert (sent["commit"] > 0) == (branch > 1 and "decode.context=d2f_causal" not in overrides)
    assert (sent["tensor"] > 0) == (tensor > 1)


def test_slurm_script_runs_the_same_job_without_slurm(tmp_path: Path, lookahead: Lines) -> None:
    """`launch/gsm8k.sh` outside Slurm: torchrun with two ranks on this machine, and a word on what it runs."""
    script = Path(__file__).parents[2] / "launch" / "gsm8k.sh"
    overrides = ["task.limit=4", "decode.branches=3", "logging.wandb.mode=disabled"]
    overrides += [f"hydra.run.dir={tmp_path}"]
    environment = {**os.environ, "BIN": str(Path(sys.executable).parent)}
    done = subprocess.run(
        [script, *overrides], capture_output=True, text=True, timeout=200, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "no model= or model.path= given" in done.stdout
    assert [line["text"] for line in results(tmp_path)] == [line["text"] for line in lookahead[:4]]
