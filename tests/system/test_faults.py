"""A rank that dies, hangs or raises ends the job everywhere, soon, with its name."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.system, pytest.mark.timeout(200)]
TIMEOUT_S = 6


def start(folder: Path, launcher: str, ranks: int, fault: list[str]) -> tuple[subprocess.Popen[str], float]:
    overrides = [
        "task.limit=40",
        f"hydra.run.dir={folder}",
        "logging.wandb.mode=disabled",
        "logging.plots=false",
        "parallel.threads=1",
        f"parallel.branch={ranks}",
        f"parallel.timeout_s={TIMEOUT_S}",
        "decode.branches=3",
    ]
    module = ["-m", "tests.system.faulty", *fault, *overrides]
    if launcher == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *module]
    else:
        mpirun = Path(sys.executable).parent / "mpirun"
        command = [str(mpirun if mpirun.exists() else "mpirun"), "-n", str(ranks), sys.executable, *module]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
        start_new_session=True,
    )
    return process, time.monotonic()


def read_until(process: subprocess.Popen[str], word: str, limit_s: float) -> tuple[str, float]:
    """Everything printed until `word` shows, and the seconds since the job began to generate."""
    assert process.stdout is not None
    printed, generating = "", 0.0
    for line in process.stdout:
        printed += line
        if "requests, model" in line:
            generating = time.monotonic()
        if word in line:
            return printed, time.monotonic() - generating
    return printed, float("inf")


@pytest.mark.parametrize("how", ["kill", "stop", "raise"])
def test_torchrun_names_the_lost_rank(tmp_path: Path, how: str) -> None:
    process, _ = start(tmp_path, "torchrun", 2, ["1", "4", how])
    try:
        printed, seconds = read_until(process, "lopa-dist: rank 1", 100)
        assert "lopa-dist: rank 1" in printed, printed[-3000:]
        assert seconds < TIMEOUT_S + 5
        if how == "raise":
            assert "MemoryError: planted fault" in printed
        if how != "stop":  # torchrun itself waits 30 s for a stopped process before it kills it
            assert process.wait(60) != 0
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        subprocess.run(["pkill", "-KILL", "-f", f"hydra.run.dir={tmp_path}"], check=False)


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs mpi4py: pip install 'lopa_dist[mpi]'")
@pytest.mark.parametrize("how", ["stop", "raise"])
def test_mpirun_names_the_lost_rank(tmp_path: Path, how: str) -> None:
    process, _ = start(tmp_path, "mpirun", 2, ["1", "4", how])
    try:
        printed, seconds = read_until(process, "lopa-dist: rank 1", 100)
        assert "lopa-dist: rank 1" in printed, printed[-3000:]
        assert seconds < TIMEOUT_S + 5
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        subprocess.run(["pkill", "-KILL", "-f", f"hydra.run.dir={tmp_path}"], check=False)
