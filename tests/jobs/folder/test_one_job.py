"""Two jobs do not run in one folder at once."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lopa_dist.checks import UserError
from lopa_dist.config import TaskConfig
from lopa_dist.jobs.folder import one_job
from lopa_dist.jobs.folder.one_job import NAME, at_work, only_job, own_folder
from lopa_dist.jobs.run.job import run
from lopa_dist.jobs.run.session import Session
from lopa_dist.parallel.launcher import Start, World
from tests.jobs.run.test_job import config

HOLDER = """
import json, sys
from pathlib import Path
from lopa_dist.jobs.folder.one_job import only_job
from lopa_dist.parallel.launcher import Start
with only_job(Path(sys.argv[1]), Start(**json.loads(sys.argv[2])), name=sys.argv[3]):
    print("held", flush=True)
    sys.stdin.read()
"""


def other(folder: Path, name: str = NAME, **start: Any) -> subprocess.Popen[str]:
    """Another process whose job is at work in `folder` until its input ends, with a lock of this name."""
    command = [sys.executable, "-c", HOLDER, str(folder), json.dumps(start), name]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_job_is_refused_with_the_first_one_s_place(tmp_path: Path) -> None:
    process = other(tmp_path, step="7-0")
    assert at_work(tmp_path)
    named = (
        rf"another job is at work in it \(process {process.pid} of host .*, Slurm job 7-0\).*remove {tmp_path / NAME}"
    )
    with pytest.raises(UserError, match=named), only_job(tmp_path, Start(), 0.2):
        pass
    process.kill()
    process.communicate()
    assert at_work(tmp_path) is False
    with only_job(tmp_path, Start(), 0.0):
        assert json.loads((tmp_path / NAME).read_text())["process"] == os.getpid()


def test_one_that_is_about_to_end_is_waited_for(tmp_path: Path) -> None:
    process = other(tmp_path)
    assert process.stdin is not None
    process.stdin.close()
    with only_job(tmp_path, Start()):
        process.wait(60)
    assert process.stdout is not None
    process.stdout.close()


def test_a_lock_that_a_dead_node_left_does_not_stop_the_same_job_from_going_on(tmp_path: Path) -> None:
    """A file server keeps it; Slurm requeues a job when the one before has ended."""
    process = other(tmp_path, step="7-0")
    with only_job(tmp_path, Start("", "7-0", 1), 0.0):
        assert json.loads((tmp_path / NAME).read_text())["start"]["requeued"] == 1
    process.communicate()


def test_an_attempt_whose_folder_was_given_to_the_next_one_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm may believe a node lost that goes on."""
    monkeypatch.setattr(one_job, "EVERY_S", 0.0)
    with only_job(tmp_path, Start("", "7-0")) as lock:
        lock.check()
        process = other(tmp_path, step="7-0", requeued=1)
        with pytest.raises(
            UserError, match=rf"started again elsewhere .* \(process {process.pid} of host .*this attempt"
        ):
            lock.check()
        (tmp_path / NAME).unlink()
        lock.check()  # nobody has it
    process.communicate()


def test_a_job_looks_at_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(session: Session) -> None:
        (tmp_path / NAME).unlink()
        (tmp_path / NAME).write_text("{}")

    monkeypatch.setattr(Session, "prepare", replace)
    with pytest.raises(UserError, match="started again elsewhere and goes on there"):
        run(config(TaskConfig(limit=2)), tmp_path, World("python"))
    assert not (tmp_path / "results.jsonl").exists()
    assert (tmp_path / "journal").is_dir()


@pytest.mark.parametrize("start", [{"agent": "a 1 2", "since": 3}, {"agents": []}, ["a"], None])
def test_a_lock_of_another_version_is_no_hindrance(tmp_path: Path, start: Any) -> None:
    holder = {"host": "h", "process": 1, "since": "then", "start": start}
    (tmp_path / NAME).write_text(json.dumps(holder))
    with only_job(tmp_path, Start(), 0.0):
        assert json.loads((tmp_path / NAME).read_text())["process"] == os.getpid()
    (tmp_path / "2026-01-01" / "12-00-00").mkdir(parents=True)
    (tmp_path / "2026-01-01" / "12-00-00" / NAME).write_text(json.dumps(holder))
    wanted = str(tmp_path / "2026-01-01" / "12-00-00")
    assert own_folder(wanted, Start("a 1 2")) == f"{wanted}-2"


def test_without_locks_a_job_runs_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with only_job(tmp_path, Start()):
        assert at_work(tmp_path) is None
    assert "has no locks" in caplog.text


def test_a_default_folder_is_a_job_s_own(tmp_path: Path) -> None:
    """Also of jobs that begin in the same second; a restarted one goes on in its folder."""
    wanted = str(tmp_path / "2026-01-01" / "12-00-00")
    first, second = Start(agent="a 1 2"), Start(agent="a 3 4")
    assert own_folder(wanted, first) == wanted
    assert own_folder(wanted, second) == f"{wanted}-2"
    with only_job(Path(wanted), first):
        assert own_folder(wanted, second) == f"{wanted}-3"
        for set_to in ("2026-01-01/12-00-00", "2026-01-01/11-59-59", "2026-01-02/00-00-01"):  # the clock
            assert own_folder(str(tmp_path / set_to), first) == wanted
    assert own_folder(wanted, Start()) == f"{wanted}-4"
