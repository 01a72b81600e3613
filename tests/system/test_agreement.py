"""Ranks that would do different work are not mixed: the job ends before it begins, and says which rank and why."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from lopa_dist.models.files import EMBEDDED
from tests.system.conftest import QUIET, ROOT

pytestmark = [pytest.mark.system, pytest.mark.timeout(200)]


def test_a_tensor_rank_with_stale_weights_is_named(tmp_path: Path) -> None:
    """As where nodes have copies of a checkpoint on their own disks."""
    for name in ("0", "1"):
        shutil.copytree(EMBEDDED, tmp_path / name)
    weights = load_file(tmp_path / "1" / "model.safetensors")
    weights["model.norm.weight"] *= 0.3
    save_file(weights, tmp_path / "1" / "model.safetensors", metadata={"format": "pt"})
    program = tmp_path / "own_disk.sh"
    program.write_text(f'exec {sys.executable} -m lopa_dist "model.path={tmp_path}/$RANK" "$@"\n')
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python", "bash",
            str(program), *QUIET, f"hydra.run.dir={tmp_path / 'run'}", "task.limit=12", "decode=embedded",
            "decode.branches=3", "model=local", "model.pattern=d2f", "parallel.tensor=2",
        ],
        capture_output=True, text=True, timeout=100, check=False, cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode != 0
    assert "rank 1 would not do the same as rank 0: model.revision is '" in done.stderr, done.stderr[-3000:]
    assert not list(tmp_path.glob("run/journal/*")), "nothing was begun"
