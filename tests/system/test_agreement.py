"""Ranks that would do different work are not mixed: the job ends before it begins, and says which rank and why."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from lopa_dist.models.files import EMBEDDED
from tests.system import forked

OTHER_CODE = """
import os, runpy
from lopa_dist.parallel import group
own = group.code_hash()
group.code_hash = lambda: own if os.environ["RANK"] == "0" else "edited"
runpy.run_module("lopa_dist", run_name="__main__", alter_sys=True)
"""

pytestmark = [pytest.mark.system, pytest.mark.timeout(200)]


def test_a_tensor_rank_with_stale_weights_is_named(tmp_path: Path) -> None:
    """As where nodes have copies of a checkpoint on their own disks."""
    for name in ("0", "1"):
        shutil.copytree(EMBEDDED, tmp_path / name)
    weights = load_file(tmp_path / "1" / "model.safetensors")
    weights["model.norm.weight"] *= 0.3
    save_file(weights, tmp_path / "1" / "model.safetensors", metadata={"format": "pt"})
    ranks = forked.job(
        tmp_path / "run", 2, "task.limit=12", "decode=embedded", "decode.branches=3", "model=local",
        "model.pattern=d2f", f"model.path={tmp_path}/${{oc.env:RANK}}", "parallel.tensor=2",
    )  # fmt: skip
    assert all(ranks.wait(100))
    assert "would not do the same as rank 0: model.revision is '" in ranks.printed(), ranks.printed()[-3000:]
    assert not list(tmp_path.glob("run/journal/*")), "nothing was begun"


def test_a_rank_with_other_code_is_named(tmp_path: Path) -> None:
    """As where a node has an image or a checkout of its own."""
    (tmp_path / "program.py").write_text(OTHER_CODE)
    given = (f"hydra.run.dir={tmp_path}/run", "logging.wandb.mode=disabled", "parallel.threads=1", "task.limit=12")
    ranks = forked.start(str(tmp_path / "program.py"), 2, *given, log=tmp_path / "log")
    assert all(ranks.wait(100))
    assert re.search(
        r"rank 1 on \S+ would not do the same as rank 0: lopa_dist is '.* \(edited\)', on rank 0 '", ranks.printed()
    )
    assert not list(tmp_path.glob("run/journal/*")), "nothing was begun"
