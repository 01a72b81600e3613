"""Signals to the launch scripts: what ends, what goes back into the queue, and what is said."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launching import OUTSIDE, ROOT, SCRIPTS, cluster, task_of


def hear_signals() -> None:
    """Undo what tests inherit under nohup, or in the background of a script: a shell cannot trap ignored signals."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def signalled(
    environment: dict[str, str], folder: Path, by: signal.Signals = signal.SIGUSR1, status: int = 75
) -> tuple[str, list[str]]:
    """What a job prints, and what it asks of Slurm, if it gets a signal while its step runs."""
    job = subprocess.Popen(
        ["bash", str(SCRIPTS[0]), "task.limit=1", f"hydra.run.dir={folder}/run"],
        env=environment, stdout=subprocess.PIPE, text=True,
        preexec_fn=hear_signals,
    )  # fmt: skip
    while job.poll() is None and not (folder / "step").exists():
        time.sleep(0.02)
    job.send_signal(by)
    printed, _ = job.communicate(timeout=30)
    assert job.returncode == status, printed
    return printed, (folder / "said").read_text().splitlines()


@pytest.mark.parametrize(("array", "name"), [(task_of("0-3", 2), "7_2"), ({"SLURM_JOB_ID": "9"}, "9")])
def test_a_task_that_is_told_to_stop_requeues_itself_alone(tmp_path: Path, array: dict[str, str], name: str) -> None:
    """One task of an array has the array's number as its job's: to requeue that would requeue them all."""
    job = f"JobId=9{' ArrayJobId=7 ArrayTaskId=2' * (name == '7_2')} JobState=RUNNING PreemptTime=None "
    environment = cluster(tmp_path, job, until_signalled(tmp_path)) | array
    _, said = signalled(environment, tmp_path)
    assert said == [f"scancel --signal=USR1 {name}.1", f"scontrol requeue {name}"]


def test_ctrl_c_ends_the_ranks_in_order_and_for_good(tmp_path: Path) -> None:
    environment = cluster(tmp_path, "JobId=9 JobState=RUNNING ", until_signalled(tmp_path)) | {"SLURM_JOB_ID": "9"}
    printed, said = signalled(environment, tmp_path, signal.SIGINT, 130)
    assert said == ["scancel --signal=USR1 9.1"], "it is not requeued"
    assert "interrupted; once more ends the ranks at once" in printed


def test_an_allocation_is_not_requeued(tmp_path: Path) -> None:
    job = "JobId=9 JobState=RUNNING BatchFlag=0 "
    environment = cluster(tmp_path, job, until_signalled(tmp_path)) | {"SLURM_JOB_ID": "9"}
    assert signalled(environment, tmp_path, signal.SIGTERM)[1] == ["scancel --signal=USR1 9.1"]


def test_a_rank_that_was_killed_is_told(tmp_path: Path) -> None:
    environment = cluster(tmp_path, "JobId=9 JobState=RUNNING BatchFlag=1 ", "kill -KILL $$") | {"SLURM_JOB_ID": "9"}
    command = ["bash", str(SCRIPTS[0]), "task.limit=1", f"hydra.run.dir={tmp_path}/run"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 137
    assert (
        f"with a larger --mem; if it had begun, lopa-dist status {tmp_path}/run has the command that goes on"
        in ran.stdout
    )


def test_a_signal_that_a_starting_rank_does_not_hear_is_repeated(tmp_path: Path) -> None:
    deaf = f"trap 'heard=1' USR1; echo $$ >{tmp_path}/step; until [ -n \"$heard\" ]; do sleep 0.1; done; "
    step = f"{deaf}trap 'exit 75' USR1; while :; do sleep 0.1; done"
    environment = cluster(tmp_path, "JobId=9 JobState=RUNNING ", step) | {"SLURM_JOB_ID": "9"}
    _, said = signalled(environment, tmp_path)
    assert said == ["scancel --signal=USR1 9.1"] * 2 + ["scontrol requeue 9"]


def until_signalled(folder: Path) -> str:
    """A step that runs until USR1."""
    return f"sleep 30 & trap 'kill $!; exit 75' USR1; echo $$ >{folder}/step; wait"


@pytest.mark.parametrize(
    ("state", "again"),
    [
        ("CANCELLED Reason=None", False),
        ("COMPLETING Reason=None", False),
        ("COMPLETING Reason=TimeLimit", True),
    ],
)
def test_a_job_that_was_cancelled_stays_so(tmp_path: Path, state: str, again: bool) -> None:
    """Slurm would take it back into the queue."""
    environment = cluster(tmp_path, f"JobId=9 JobState={state} Dependency=(null)", until_signalled(tmp_path))
    printed, said = signalled(environment | {"SLURM_JOB_ID": "9"}, tmp_path)
    assert said == ["scancel --signal=USR1 9.1", *(["scontrol requeue 9"] if again else [])]
    assert ("Slurm is ending this job (cancelled, requeued, or" in printed) == (not again)


@pytest.mark.parametrize(("finished", "again"), [(0, False), (1, True)])
def test_a_job_whose_time_limit_is_too_short_ends(tmp_path: Path, finished: int, again: bool) -> None:
    """At the second time that it finished no request."""
    (tmp_path / "run" / "journal").mkdir(parents=True)
    (tmp_path / "run" / "journal" / "001-0.jsonl").write_text("{}\n")
    step = f"printf '%.0s{{}}\n' $(seq {finished}) >{tmp_path}/run/journal/002-0.jsonl; " * finished
    environment = cluster(tmp_path, "JobId=9 JobState=RUNNING ", step + until_signalled(tmp_path))
    printed, said = signalled(environment | {"SLURM_JOB_ID": "9", "SLURM_RESTART_COUNT": "1"}, tmp_path)
    assert ("scontrol requeue 9" in said) == again
    assert ("give a longer --time" in printed) == (not again)


@pytest.mark.parametrize(
    ("preempted", "requeued"),
    [("2026-11-23T06:35:59", ["scontrol requeue 9"]), ("2026-11-23T06:00:00", []), ("None", [])],
)
def test_a_job_that_is_preempted_goes_back_into_the_queue(tmp_path: Path, preempted: str, requeued: list[str]) -> None:
    """Slurm signals its ranks alone. A preemption before this start says nothing."""
    job = f"JobId=9 JobState=RUNNING StartTime=2026-11-23T06:35:20 PreemptTime={preempted} SuspendTime=None"
    environment = cluster(tmp_path, job, "exit 75") | {"SLURM_JOB_ID": "9"}
    command = ["bash", str(SCRIPTS[0]), "task.limit=1", f"hydra.run.dir={tmp_path}/run"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert ran.returncode == 75, ran.stdout
    assert (tmp_path / "said").read_text().splitlines() == requeued


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 75), (signal.SIGHUP, 75), (signal.SIGINT, 130)])
def test_a_signal_ends_a_sweep_too(tmp_path: Path, number: signal.Signals, status: int) -> None:
    """SIGTERM and SIGHUP are for the script alone, Ctrl-C for all processes of the terminal."""
    (tmp_path / "lopa-dist").write_text(
        f"#!{sys.executable}\n"
        "import signal, sys, time\n"
        "if sys.argv[1] == 'report': sys.exit()\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(130))\n"
        "print('begun', flush=True)\n"
        "while True: time.sleep(0.05)  # a signal just before pause() would not end it\n"
    )
    (tmp_path / "lopa-dist").chmod(0o755)
    (tmp_path / "sweep.sh").symlink_to(ROOT / "launch" / "sweep.sh")
    with subprocess.Popen(
        ["bash", str(tmp_path / "sweep.sh"), "launcher=local", "decode.drafts=4,8"], start_new_session=True,
        env=OUTSIDE | {"BIN": str(tmp_path), "FOLDER": str(tmp_path)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=hear_signals, text=True,
    ) as ran:  # fmt: skip
        assert ran.stdout
        assert ran.stdout.readline() == "begun\n"
        (os.killpg if number == signal.SIGINT else os.kill)(ran.pid, number)
        try:
            _, err = ran.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(ran.pid, signal.SIGKILL)
            raise
    assert ran.returncode == status
    assert "scancel --name=lopa-sweep" in err
