"""On a real, throw-away Slurm cluster: `launch/gsm8k.sh` and plain srun give the texts of one process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MISSING = [tool for tool in ("slurmctld", "slurmd", "sbatch") if shutil.which(tool) is None]
pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(MISSING), reason=f"needs Slurm ({', '.join(MISSING)}): apt-get install slurmctld slurmd"),
    pytest.mark.skipif(os.geteuid() != 0, reason="the throw-away cluster needs root"),
]
OVERRIDES = ["task.limit=12", "decode.branches=3", "logging.wandb.mode=disabled", "logging.plots=false"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of commands on a running 2-node cluster."""
    folder = tmp_path_factory.mktemp("slurm") / "cluster"
    bins = str(Path(sys.executable).parent)
    environment = {**os.environ, "LOPA_SLURM_DIR": str(folder), "BIN": bins, "SLURM_CONF": str(folder / "slurm.conf")}
    script = str(ROOT / "slurm" / "dev-cluster.sh")
    subprocess.run([script, "start"], env=environment, check=True, timeout=60)
    yield environment
    subprocess.run([script, "stop"], env=environment, check=True, timeout=60)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The texts that every other way of starting has to give."""
    folder = tmp_path_factory.mktemp("one")
    command = [sys.executable, "-m", "lopa_dist", *OVERRIDES, f"hydra.run.dir={folder}", "parallel.threads=1"]
    subprocess.run(command, check=True, timeout=200, cwd=ROOT, capture_output=True)
    return texts(folder)


def texts(folder: Path) -> list[str]:
    return [json.loads(line)["text"] for line in (folder / "results.jsonl").read_text().splitlines()]


def test_sbatch_on_two_nodes(cluster: dict[str, str], one_process: list[str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = ["sbatch", "--parsable", "--nodes=2", f"--output={log}", "launch/gsm8k.sh", *OVERRIDES]
    command += [f"hydra.run.dir={tmp_path / 'run'}", "parallel.branch=2"]
    done = subprocess.run(command, env=cluster, cwd=ROOT, capture_output=True, text=True, check=True)
    job, state, end = done.stdout.strip(), "", time.monotonic() + 200
    while state not in ("COMPLETED", "FAILED", "CANCELLED") and time.monotonic() < end:
        time.sleep(1)
        ask = ["squeue", "-h", "-a", "-t", "all", "-j", job, "-o", "%T"]
        state = subprocess.run(ask, env=cluster, capture_output=True, text=True, check=True).stdout.strip()
    assert state == "COMPLETED", log.read_text()[-3000:]
    assert "no model.path given" in log.read_text()
    assert texts(tmp_path / "run") == one_process
    world = json.loads((tmp_path / "run" / "report.json").read_text())["world"]
    assert (world["size"], world["data"], world["branch"]) == (4, 2, 2)


def test_srun_without_torchrun(cluster: dict[str, str], one_process: list[str], tmp_path: Path) -> None:
    command = ["srun", "--nodes=2", "--ntasks-per-node=1", sys.executable, "-m", "lopa_dist", *OVERRIDES]
    command += [f"hydra.run.dir={tmp_path}", "parallel.branch=2", "parallel.threads=1"]
    done = subprocess.run(command, env=cluster, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert texts(tmp_path) == one_process
    assert json.loads((tmp_path / "report.json").read_text())["world"]["launcher"] == "srun"
    assert not list(ROOT.glob(".lopa_dist-rendezvous*"))
