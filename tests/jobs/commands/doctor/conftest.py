"""The surroundings of the doctor's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from lopa_dist.jobs.commands.doctor import surroundings


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder of one's own, and no sign of Slurm or W&B."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(surroundings.sandbox, "check", lambda confined: None)
    names = ("JOB_ID", "JOB_NODELIST", "CPUS_PER_TASK", "NNODES", "SUBMIT_DIR")
    for name in ("CC", *(f"SLURM_{name}" for name in names)):
        monkeypatch.delenv(name, raising=False)
