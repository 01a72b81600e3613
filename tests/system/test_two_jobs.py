"""Two jobs of several ranks in one folder: the second is refused while the first runs, and nothing is mixed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from lopa_dist.composing import composed
from lopa_dist.jobs.run.job import run
from lopa_dist.parallel.launcher import World
from tests.system import forked
from tests.system.random_faults import SETTINGS, outcome

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]


def test_the_second_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    """The second has another mesh, and would set aside what the first one has done."""
    folder = tmp_path / "shared"
    overrides = [f"hydra.run.dir={folder}", *SETTINGS, "parallel.data=2", "parallel.timeout_s=120"]
    planted = ["generating", "1", "SIGSTOP", "itself"]
    first = forked.start("tests.system.planted", 2, *planted, *overrides, log=tmp_path / "first.log")
    end = time.monotonic() + 120
    while not list(folder.glob("journal/001-1.jsonl")) and first.running() and time.monotonic() < end:
        time.sleep(0.1)
    second = forked.job(folder, 2, *SETTINGS, "parallel.branch=2", "parallel.timeout_s=6", "job.resume=new")
    assert all(second.wait())
    assert "another job is at work in it (process" in second.printed(), second.printed()[-3000:]
    assert not list(tmp_path.glob("shared/journal.old*"))
    while first.running():
        for process in first.processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.1)
    assert first.wait() == [0, 0], first.printed()[-3000:]
    run(composed(SETTINGS), tmp_path / "alone", World("python"))
    assert outcome(folder) == outcome(tmp_path / "alone")
