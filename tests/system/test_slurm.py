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

from tests.system import slurm
from tests.system.conftest import ROOT, Lines, entries

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        bool(slurm.MISSING), reason=f"needs Slurm ({', '.join(slurm.MISSING)}): apt-get install slurmctld slurmd"
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="the throw-away cluster needs root"),
]
OVERRIDES = ["task.limit=8", "decode.branches=3", "logging.wandb.mode=disabled"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of commands on a running 2-node cluster."""
    with slurm.cluster(tmp_path_factory.mktemp("slurm") / "cluster") as environment:
        yield environment


def texts(folder: Path) -> list[str]:
    return [json.loads(line)["text"] for line in (folder / "results.jsonl").read_text().splitlines()]


def test_sbatch_on_two_nodes(cluster: dict[str, str], one_process: list[str], tmp_path: Path) -> None:
    """Submitted by a task of an array, it has the whole input.

    Though sbatch passes on the task's variables, and those of the step that it ran in.
    """
    task = {"JOB_ID": "999", "TASK_ID": "1", "TASK_MIN": "0", "TASK_MAX": "1", "TASK_COUNT": "2"}
    outer = {f"SLURM_ARRAY_{name}": value for name, value in task.items()}
    outer |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "7", "SLURM_MEM_PER_CPU": "100"}
    log = tmp_path / "log"
    given = ["--nodes=2", "--mem=900M", "launch/gsm8k.sh", *OVERRIDES]
    job = submit(cluster | outer, log, *given, f"hydra.run.dir={tmp_path / 'run'}", "parallel.branch=2")
    assert wait_until_done(cluster, job) == {"COMPLETED"}, log.read_text()[-3000:]
    assert "this job is no task of array 999" in log.read_text()
    assert "the embedded model runs on its own word problems" in log.read_text()
    assert (tmp_path / "run" / f"slurm-{job}.log").resolve() == log.resolve()
    assert "8 requests: accuracy " in log.read_text().splitlines()[-1]
    assert texts(tmp_path / "run") == one_process[:8]
    world = json.loads((tmp_path / "run" / "report.json").read_text())["world"]
    assert (world["size"], world["data"], world["branch"]) == (4, 2, 2)


def test_srun_without_torchrun(cluster: dict[str, str], one_process: list[str], tmp_path: Path) -> None:
    command = ["srun", "--nodes=2", "--ntasks-per-node=1", sys.executable, "-m", "lopa_dist", *OVERRIDES]
    command += [f"hydra.run.dir={tmp_path / 'run'}", "parallel.branch=2", "parallel.threads=1"]
    # in a folder of its own: jobs of other tests, whose ranks are killed, leave their file in the checkout
    environment = cluster | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert texts(tmp_path / "run") == one_process[:8]
    assert json.loads((tmp_path / "run/report.json").read_text())["world"]["launcher"] == "srun"
    assert not list(tmp_path.glob(".lopa_dist-rendezvous*"))


def test_a_rank_that_is_killed_while_joining_is_named_by_its_neighbour(cluster: dict[str, str], tmp_path: Path) -> None:
    """Plain srun lets the others go on."""
    fault = ["-m", "tests.system.planted", "joining", "0", "SIGKILL", "itself"]
    command = ["srun", "--nodes=1", "--ntasks=2", "--overcommit", sys.executable, *fault, *OVERRIDES]
    command += [f"hydra.run.dir={tmp_path}", "parallel.branch=2", "parallel.threads=1"]
    done = subprocess.run(command, env=cluster, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode != 0
    assert "rank 0 of 2 ended before all had joined" in done.stderr, done.stderr[-3000:]


def submit(cluster: dict[str, str], log: Path, *arguments: str) -> str:
    command = ["sbatch", "--parsable", f"--output={log}", *arguments]
    return subprocess.run(command, env=cluster, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def state_of(cluster: dict[str, str], job: str) -> set[str]:
    ask = ["squeue", "-h", "-a", "-r", "-t", "all", "-j", job, "-o", "%T"]
    return set(subprocess.run(ask, env=cluster, capture_output=True, text=True, check=False).stdout.split())


def wait_until_done(cluster: dict[str, str], job: str, limit_s: float = 200) -> set[str]:
    over, end = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}, time.monotonic() + limit_s
    while not (states := state_of(cluster, job)) <= over and time.monotonic() < end:
        time.sleep(1)
    return states


def wait_for_entries(folder: Path, count: int, parts: str = "*", limit_s: float = 120) -> None:
    end = time.monotonic() + limit_s
    while entries(folder, parts) < count and time.monotonic() < end:
        time.sleep(0.05)


def running(folder: Path) -> bool:
    return subprocess.run(["pgrep", "-f", f"hydra.run.dir={folder}"], capture_output=True, check=False).returncode == 0


SLOW = ["task.limit=40", "decode=embedded_plain", "logging.wandb.mode=disabled"]


def test_requeued_twice_gives_the_same_results(cluster: dict[str, str], plain: Lines, tmp_path: Path) -> None:
    """By `scontrol requeue`, then by the signal that Slurm sends before a time limit; the ranks are not the first step.

    Nor does what sbatch is told to pass on decide what the ranks get.
    """
    folder, log = tmp_path / "run", tmp_path / "log"
    some = ["logging.wandb.mode=offline", "engine.max_sequences=2"]
    script = tmp_path / "own.sh"
    script.write_text('#!/bin/bash\nsrun --ntasks=1 true\nexec bash launch/gsm8k.sh "$@"\n')
    passed = f"--export=BIN={cluster['BIN']},SLURM_CONF={cluster['SLURM_CONF']}"
    given = ["--requeue", "--open-mode=append", "--cpus-per-task=2", "--ntasks-per-node=1", passed]
    job = submit(cluster, log, *given, str(script), *SLOW, f"hydra.run.dir={folder}", *some)
    hows = (["scontrol", "requeue", job], ["scancel", "--batch", "-s", "USR1", job])
    for attempt, how in enumerate(hows, 1):
        wait_for_entries(folder, 6, f"{attempt:03}-*")
        subprocess.run(how, env=cluster, check=True)
        end = time.monotonic() + 60
        while "RUNNING" in state_of(cluster, job) and time.monotonic() < end:
            time.sleep(0.2)
    assert wait_until_done(cluster, job) == {"COMPLETED"}, log.read_text()[-3000:]
    drain = log.read_text().split("told to stop")[-1].split("not finished: back into the queue")[0]
    assert "stopped by SIGUSR1; the results so far are kept; go on with" in drain
    assert "W&B" not in drain, "its service goes on to the end, though every process of the job is signalled"
    found = texts(folder)
    assert len(found) == 40
    assert found[: len(plain)] == [line["text"] for line in plain]
    assert json.loads((folder / "report.json").read_text())["attempts"] == 3


def test_an_array_shares_the_input_and_merges(cluster: dict[str, str], one_process: list[str], tmp_path: Path) -> None:
    environment = {**cluster, "RANKS": "1"}
    given = ["--time=00:40:00", "--mem=900M"]
    command = ["sbatch", "--parsable", f"--output={tmp_path}/log-%a", "--array=1-2", *given]
    command += ["launch/gsm8k.sh", *OVERRIDES]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    job = done.stdout.strip()
    folder = ROOT / "outputs" / f"slurm-{job}"
    try:
        logs = "".join(path.read_text() for path in tmp_path.glob("log-*"))
        assert wait_until_done(cluster, job) == {"COMPLETED"}, logs[-3000:]
        merged = [sys.executable, "-m", "lopa_dist", "merge", str(folder)]
        subprocess.run(merged, check=True, timeout=60, cwd=ROOT)
        assert texts(folder) == one_process[:8]
        assert json.loads((folder / "report.json").read_text())["shards"] == 2
        shutil.rmtree(folder / "shard-1")
        refused = subprocess.run(merged, timeout=60, cwd=ROOT, capture_output=True, text=True, check=False)
        assert "1 of 2 shards are complete; shard 1 is missing" in refused.stderr
        options = "--array=1 --time=40:00 --cpus-per-task=2 --mem=900M --partition=dev"
        again = f"RANKS=1 sbatch {options} launch/job.sh {' '.join(OVERRIDES)} task.shards=2 hydra.run.dir={folder}"
        assert again.replace(f"{ROOT}/", "") in refused.stderr, refused.stderr
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_scancel_leaves_no_process_and_two_jobs_share_a_node(cluster: dict[str, str], tmp_path: Path) -> None:
    """Nor does the job come back, though its ranks have ended in order before Slurm kills them."""
    long = ["task.limit=2000", *SLOW[1:], "job.grace_s=0"]
    on_n1 = ["--nodelist=n1", "launch/gsm8k.sh"]
    folders = [tmp_path / "a", tmp_path / "b"]
    jobs = [
        submit({**cluster, "RANKS": ranks}, tmp_path / f"log-{f.name}", *on_n1, *long, f"hydra.run.dir={f}")
        for ranks, f in zip("12", folders, strict=True)
    ]
    for folder in folders:
        wait_for_entries(folder, 3)
        assert entries(folder) >= 3
    for job in jobs:
        subprocess.run(["scancel", job], env=cluster, check=True)
    end = time.monotonic() + 10
    while any(map(running, folders)) and time.monotonic() < end:
        time.sleep(0.2)
    assert not any(map(running, folders))
    assert [wait_until_done(cluster, job) for job in jobs] == [{"CANCELLED"}] * 2


def test_a_sweep_through_slurm_ends_with_one_plot(cluster: dict[str, str], tmp_path: Path) -> None:
    environment = {**cluster, "PATH": f"{Path(cluster['SLURM_CONF']).parent / 'bin'}:{cluster['PATH']}"}
    environment["FOLDER"] = str(tmp_path / "sweep")
    command = [
        "launch/sweep.sh", "launcher=slurm", "hydra.launcher.cpus_per_task=1", "decode.branches=0,2",
        "task.limit=6", "parallel.threads=1", "logging.wandb.mode=disabled",
        "logging.progress=never",
    ]  # fmt: skip
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    reports = sorted((tmp_path / "sweep").glob("*/report.json"))
    assert len(reports) == 2
    [asked] = (tmp_path / "sweep").glob(".submitit/*/*_submission.sh")
    assert "#SBATCH --job-name=lopa-sweep\n" in asked.read_text()
    assert len([*(tmp_path / "sweep").glob(".submitit/*/*_log.out")]) == 2
    assert (tmp_path / "sweep" / "pareto.pdf").stat().st_size > 5_000
    stamps = {path: path.stat().st_mtime_ns for path in reports}
    shutil.rmtree(reports[1].parent)
    again = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert again.returncode == 0, (again.stdout + again.stderr)[-3000:]
    assert [p for p, stamp in stamps.items() if p.stat().st_mtime_ns != stamp] == [reports[1]]
