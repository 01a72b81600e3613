"""A job that is killed or stopped goes on in its folder and ends as if nothing had happened.

`kills.py` kills at random moments.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.system import forked, kills
from tests.system.conftest import REQUESTS, Lines, entries, results

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]


def overrides(folder: Path, *extra: str) -> list[str]:
    return [
        f"hydra.run.dir={folder}", f"task.limit={REQUESTS}", "decode=embedded_plain", "logging.wandb.mode=disabled",
        "logging.progress=never", "parallel.threads=1", "parallel.timeout_s=10",
        "job.crashes=null", *extra,
    ]  # fmt: skip


def forked_job(folder: Path, *extra: str, ranks: int = 2) -> forked.Ranks:
    return forked.start("lopa_dist", ranks, *overrides(folder, *extra), log=folder.parent / "log")


def under_torchrun(folder: Path, *extra: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "lopa_dist",
         *overrides(folder, *extra)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=Path(__file__).parents[2],
        start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def finish(job: subprocess.Popen[str], folder: Path) -> str:
    printed, _ = job.communicate(timeout=300)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)
    subprocess.run(["pkill", "-KILL", "-f", f"hydra.run.dir={folder}"], check=False)
    return printed


def wait_for(folder: Path, count: int, running: Callable[[], bool]) -> None:
    while running() and entries(folder) < count:
        time.sleep(0.02)


def runs(job: subprocess.Popen[str]) -> Callable[[], bool]:
    return lambda: job.poll() is None


def ends_as_if_nothing_had_happened(folder: Path, plain: Lines) -> None:
    """The same job again, which goes on."""
    again = forked_job(folder, ranks=1)
    assert not any(again.wait()), again.printed()[-3000:]
    assert results(folder) == plain


def test_a_signal_stops_in_order_and_the_job_goes_on(tmp_path: Path, plain: Lines) -> None:
    folder = tmp_path / "run"
    job = forked_job(folder, "job.grace_s=20", ranks=1)
    wait_for(folder, 5, job.running)
    os.kill(*pids(job), signal.SIGUSR1)
    assert job.wait() == [75]
    assert "stopped by SIGUSR1" in job.printed(), job.printed()[-3000:]
    some_are_done(folder, plain)
    ends_as_if_nothing_had_happened(folder, plain)


def test_a_signal_to_torchrun_stops_in_order_and_the_job_goes_on(tmp_path: Path, plain: Lines) -> None:
    folder = tmp_path / "run"
    job = under_torchrun(folder, "job.grace_s=0")
    wait_for(folder, 5, runs(job))
    os.kill(job.pid, signal.SIGTERM)
    printed = finish(job, folder)
    assert "stopped by SIGTERM" in printed, printed[-3000:]
    assert job.returncode != 0  # torchrun has a status of its own
    some_are_done(folder, plain)
    ends_as_if_nothing_had_happened(folder, plain)


def some_are_done(folder: Path, plain: Lines) -> None:
    some = results(folder)
    assert 5 <= len(some) < REQUESTS
    assert [line for line in plain if line in some] == some


def test_one_rank_is_told_to_stop_and_all_leave_when_rank_0_has_written(tmp_path: Path, plain: Lines) -> None:
    """With W&B, whose service a scheduler signals too: all of it is written, and the job goes on."""
    folder = tmp_path / "run"
    job = forked_job(folder, "job.grace_s=1", "logging.wandb.mode=offline", "engine.max_sequences=1")
    wait_for(folder, 2, job.running)
    ranks = pids(job)
    for service in [process for rank in ranks for process in children(rank)]:
        os.kill(service, signal.SIGUSR1)
    os.kill(ranks[1], signal.SIGUSR1)
    assert job.wait() == [75, 75]
    printed = job.printed()
    assert (
        f"stopped by SIGUSR1; the results so far are kept; go on with the same command and hydra.run.dir={folder}"
        in printed
    ), printed
    assert "does not answer" not in printed
    assert "WARNING" not in printed, "W&B goes on to the end"
    assert {file.name for file in folder.iterdir()} >= {"report.json", "report.html"}
    [log] = folder.glob("wandb/offline-run-*/*.wandb")
    assert log.stat().st_size > 1000
    [own] = [end for end in ends(folder) if end["replica"] == 0]
    logged = json.loads((folder / "wandb" / "run-0.json").read_text())["steps"]
    assert logged == own["statistics"]["steps"]  # those of rank 0 alone, although the report counts both
    some = results(folder)
    assert [line for line in plain if line in some] == some


def ends(folder: Path) -> list[dict[str, Any]]:
    """What each rank wrote at the end of the first attempt."""
    lines = [line for file in (folder / "journal").glob("001-*.jsonl") for line in file.read_text().splitlines()]
    return [entry for entry in map(json.loads, lines) if "statistics" in entry]


def long_input(folder: Path) -> tuple[Path, list[str]]:
    """An input that takes minutes to read, and the overrides of a job with it."""
    file = folder / "in.jsonl"
    file.write_text("".join(f'{{"prompt": "Tom has {i} apples ."}}\n' for i in range(1_500_000)))
    return file, ["task=batch", f"task.input={file}", "task.limit=null"]


def test_a_signal_before_the_first_step_is_answered_at_once(tmp_path: Path) -> None:
    """However long the input takes to read: nothing is lost."""
    file, own = long_input(tmp_path)
    job = forked_job(tmp_path / "run", *own, ranks=1)
    [process] = pids(job)
    while not reads(process, file):
        assert job.running()
        time.sleep(0.02)
    time.sleep(1)  # the job has begun
    began = time.monotonic()
    os.kill(process, signal.SIGUSR1)
    assert job.wait() == [75]
    assert time.monotonic() - began < 60  # it did not read on
    assert "stopped by SIGUSR1 before the first step; go on" in job.printed()
    assert "Traceback" not in job.printed()
    assert entries(tmp_path / "run") == 0


def test_nor_do_two_ranks_of_which_one_is_told_read_on(tmp_path: Path) -> None:
    """Its scheduler may not reach the other."""
    file, own = long_input(tmp_path)
    job = forked_job(tmp_path / "run", *own)
    told = pids(job)[1]
    while not reads(told, file):
        assert job.running()
        time.sleep(0.02)
    time.sleep(1)  # the ranks meet
    began = time.monotonic()
    os.kill(told, signal.SIGUSR1)
    assert job.wait() == [75, 75]
    assert time.monotonic() - began < 60  # it did not read on
    assert "stopped by SIGUSR1 before the first step; go on" in job.printed(), job.printed()[-3000:]
    assert entries(tmp_path / "run") == 0


def reads(process: int, file: Path) -> bool:
    """Whether it has the file open."""
    with contextlib.suppress(OSError):
        return any(descriptor.resolve() == file for descriptor in Path(f"/proc/{process}/fd").iterdir())
    return False


def pids(job: forked.Ranks) -> list[int]:
    return [process.pid for process in job.processes if process.pid is not None]


def children(process: int) -> list[int]:
    return [
        int(n) for n in subprocess.run(["pgrep", "-P", str(process)], capture_output=True, text=True).stdout.split()
    ]


def test_torchrun_restarts_go_on(tmp_path: Path, plain: Lines) -> None:
    overrides = [
        f"task.limit={REQUESTS}", "decode=embedded_plain", "logging.wandb.mode=disabled",
        "parallel.threads=1", "logging.progress=never", "parallel.timeout_s=10", "job.resume=new",
    ]  # fmt: skip
    job = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1", "-m",
         "lopa_dist", *overrides],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    while job.poll() is None and not (found := list(tmp_path.glob("outputs/*/*/journal"))):
        time.sleep(0.05)
    wait_for(found[0].parent, 5, runs(job))
    os.kill(children(job.pid)[-1], signal.SIGKILL)
    printed = finish(job, tmp_path)
    assert job.returncode == 0, printed[-3000:]
    (folder,) = tmp_path.glob("outputs/*/*")
    assert results(folder) == plain


def test_sigkill_at_any_moment_loses_and_repeats_nothing(tmp_path: Path) -> None:
    """Nor do figures differ, with drafts and branches."""
    assert kills.main([str(tmp_path), "--runs", "1", "--seed", "1"]) == 0  # one kill; the program makes up to three
