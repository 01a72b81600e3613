"""The main job under mpirun gives the texts of one process."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system import many_calls

MPIRUN = Path(sys.executable).parent / "mpirun"
pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(
        importlib.util.find_spec("mpi4py") is None or not MPIRUN.exists(),
        reason="needs mpi4py and an MPI in this environment: pip install mpi4py mpich",
    ),
]


def job(folder: Path, ranks: int, *overrides: str) -> list[str]:
    start = [str(MPIRUN), "-n", str(ranks)]
    fixed = ["task.limit=8", "decode.branches=3", "logging.wandb.mode=disabled"]
    command = [*start, sys.executable, "-m", "lopa_dist", *fixed, f"hydra.run.dir={folder}", *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "parallel.threads=1"], capture_output=True, text=True, timeout=200, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line)["text"] for line in (folder / "results.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("mesh", "backend"),
    [("parallel.branch=2", "mpi"), ("parallel.data=2", "gloo")],
)
def test_two_ranks(tmp_path: Path, one_process: list[str], mesh: str, backend: str) -> None:
    assert job(tmp_path, 2, mesh, f"parallel.backend={backend}") == one_process[:8]
    world = json.loads((tmp_path / "report.json").read_text())["world"]
    assert (world["launcher"], world["backend"]) == ("mpirun", backend)


def test_call_after_call_holds_no_more_files_or_threads(tmp_path: Path) -> None:
    """A few calls; `python -m tests.system.many_calls` makes 300, also under torchrun."""
    for rank, held in enumerate(many_calls.run("mpirun", 7, tmp_path)):
        assert many_calls.constant(held), (rank, held)
