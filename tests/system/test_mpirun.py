"""The main job under mpirun gives the texts of one process."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MPIRUN = Path(sys.executable).parent / "mpirun"
pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(
        importlib.util.find_spec("mpi4py") is None or not MPIRUN.exists(),
        reason="needs mpi4py and an MPI in this environment: pip install mpi4py mpich",
    ),
]


def job(folder: Path, ranks: int, *overrides: str) -> list[str]:
    start = [str(MPIRUN), "-n", str(ranks)] if ranks > 1 else []
    fixed = ["task.limit=20", "decode.branches=3", "logging.wandb.mode=disabled", "logging.plots=false"]
    command = [*start, sys.executable, "-m", "lopa_dist", *fixed, f"hydra.run.dir={folder}", *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "parallel.threads=1"], capture_output=True, text=True, timeout=200, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line)["text"] for line in (folder / "results.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("mesh", ["parallel.branch=2", "parallel.data=2"])
@pytest.mark.parametrize("backend", ["mpi", "gloo"])
def test_two_ranks(tmp_path: Path, mesh: str, backend: str) -> None:
    expected = job(tmp_path / "one", 1)
    assert job(tmp_path / "two", 2, mesh, f"parallel.backend={backend}") == expected
    world = json.loads((tmp_path / "two" / "report.json").read_text())["world"]
    assert (world["launcher"], world["backend"]) == ("mpirun", backend)
