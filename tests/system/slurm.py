"""A throw-away Slurm cluster of two nodes on this machine, for tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
MISSING = [tool for tool in ("slurmctld", "slurmd", "sbatch") if shutil.which(tool) is None]
POSSIBLE = not MISSING and os.geteuid() == 0


@contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """A running cluster, whose files are in `folder`; yields the environment of commands that use it."""
    bins = str(Path(sys.executable).parent)
    environment = {**os.environ, "LOPA_SLURM_DIR": str(folder), "BIN": bins, "SLURM_CONF": str(folder / "slurm.conf")}
    script = str(ROOT / "slurm" / "dev-cluster.sh")
    subprocess.run([script, "start"], env=environment, check=True, timeout=60)
    try:
        yield environment
    finally:
        subprocess.run([script, "stop"], env=environment, check=True, timeout=60)
