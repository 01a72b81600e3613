"""Real jobs on this machine beside their simulation: forwards, steps of each replica, processor time and seconds.

Processor time is compared besides seconds, because a machine that others use, too, holds a job up, and not evenly. What
a job takes before its first step is subtracted: the processor time of the same job with few problems.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.branch_scaling import ENVIRONMENT, TORCHRUN, collectives
from benchmarks.cluster_calibration import SETTINGS, Measured, StepTimes, builder_here, by_rows, step_times
from benchmarks.cluster_simulator import Cluster, Kind, Outcome, Requests, simulate
from benchmarks.embedded import BASE
from benchmarks.latency_model import Link, Load, Model, exchange, fit

IN_FLIGHT = 16
FEW = 4  # problems of a replica in a job that is to show what starting takes
SEEDS = 10  # simulations of a job, whose means are compared


@dataclass(frozen=True)
class Trial:
    """A job that is run: its mesh, and the setting that it decodes with."""

    data: int
    branch: int
    setting: str

    @property
    def ranks(self) -> int:
        """In all."""
        return self.data * self.branch


TRIALS = (
    Trial(1, 1, "k=0 m=10"),
    Trial(2, 1, "k=0 m=10"),
    Trial(4, 1, "k=0 m=10"),
    Trial(1, 2, "k=1 m=10"),
)


def processor_seconds() -> float:
    """That all processes took which this one has started and which have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_job(trial: Trial, problems: int, folder: Path) -> dict[str, Any]:
    """Run a job as a user does; returns its requests' lengths and forwards, each replica's steps, and its seconds."""
    setting = SETTINGS[trial.setting]
    command = [
        sys.executable, *TORCHRUN, str(trial.ranks), "-m", "lopa_dist", f"task.limit={problems}",
        f"parallel.data={trial.data}", f"parallel.branch={trial.branch}", "parallel.threads=1",
        *(f"decode.{key}={setting[key]}" for key in ("branches", "drafts")), f"engine.max_sequences={IN_FLIGHT}",
        f"hydra.run.dir={folder}", "logging.wandb.mode=disabled", "logging.progress=never",
    ]  # fmt: skip
    before = processor_seconds()
    subprocess.run(command, stdout=subprocess.DEVNULL, env=ENVIRONMENT, check=True)
    spent = processor_seconds() - before
    report = json.loads((folder / "report.json").read_text())
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    replicas = [json.loads(file.read_text().splitlines()[-1]) for file in sorted((folder / "journal").glob("001-*"))]
    return {
        "prompt": [line["usage"]["prompt_tokens"] for line in lines],
        "answer": [line["usage"]["completion_tokens"] + (line["finish_reason"] == "stop") for line in lines],
        "forwards": sum(line["usage"]["forwards"] for line in lines),
        "steps": [replica["statistics"]["steps"] for replica in replicas],
        "seconds": report["decode_s"],
        "processor_s": spent,  # of all ranks, their start included
    }


def replica_kind(
    measured: Measured, trial: Trial, forward: Callable[[float], float], link: Link | None, kv_bytes: float
) -> Kind:
    """A replica of this machine's ranks; without a link its steps take what a rank works in them on the mean."""
    model = Model(kv_bytes=kv_bytes)
    block = BASE["block_size"]

    def seconds(rows: float, sequences: int) -> float:
        if trial.branch == 1 or link is None:
            return forward(rows)
        commits = measured.tokens_per_forward / block
        load = Load(measured.branch_limit, sequences, masked=measured.predictions, commits=commits, block=block)
        return forward(rows) + sum(exchange(model, link, load, trial.branch).values())

    return Kind(measured.gains(trial.branch, busiest=link is not None), seconds)


def simulated(
    trial: Trial, measured: Measured, job: Mapping[str, Any], tables: Sequence[Mapping[int, float]], link: Link | None
) -> list[Outcome]:
    """Simulations of a job on ranks whose steps take what the tables say on the mean."""
    shape = builder_here().shape
    kv_bytes = 4.0 * 2 * shape.layers * shape.kv_heads * shape.head_dim
    curves = [by_rows(table) for table in tables]
    kind = replica_kind(measured, trial, lambda rows: statistics.mean(at(rows) for at in curves), link, kv_bytes)
    requests = Requests(np.array(job["prompt"]), np.array(job["answer"]))
    return [simulate(requests, Cluster(trial.data, {1: kind}, IN_FLIGHT), seed=seed) for seed in range(SEEDS)]


def compare(trial: Trial, measured: Measured, problems: int, seconds: float, link: Link) -> dict[str, Any]:
    """Run a job, with steps timed before it and after it for so many seconds each, and simulate it."""
    with tempfile.TemporaryDirectory() as folder:
        few = run_job(trial, FEW * trial.data, Path(folder) / "few")
        times: list[StepTimes] = [step_times(trial.setting, IN_FLIGHT, trial.ranks, seconds)]
        job = run_job(trial, problems, Path(folder) / "all")
        times.append(step_times(trial.setting, IN_FLIGHT, trial.ranks, seconds))
    clock, processor = [one.clock for one in times], [one.processor for one in times]

    def processor_s(job: Mapping[str, Any]) -> float:
        """Of all ranks; waiting for one another takes none."""
        found = simulated(trial, measured, job, processor, None)
        return trial.branch * statistics.mean(float(one.busy.sum()) for one in found)

    found = simulated(trial, measured, job, clock, link)
    apart = [simulated(trial, measured, job, [table], link) for table in clock]
    return {
        "data": trial.data,
        "branch": trial.branch,
        "setting": trial.setting,
        "problems": problems,
        "measured": {
            "forwards": job["forwards"],
            "steps": job["steps"],
            "seconds": job["seconds"],
            "processor_s": job["processor_s"] - few["processor_s"],
        },
        "simulated": {
            "forwards": statistics.mean(int(one.forwards.sum()) for one in found),
            "steps": [round(float(steps), 1) for steps in np.mean([one.steps for one in found], 0)],
            "seconds": statistics.mean(one.seconds for one in found),
            "seconds_before_and_after": [statistics.mean(one.seconds for one in some) for some in apart],
            "processor_s": processor_s(job) - processor_s(few),
        },
        "step_ms_by_rows": [{rows: round(1000 * s, 2) for rows, s in table.items()} for table in clock],
        "processor_ms_by_rows": [{rows: round(1000 * s, 2) for rows, s in table.items()} for table in processor],
    }


def validate(settings: dict[str, Measured], problems: int, seconds: float) -> dict[str, Any]:
    """Compare all trials."""
    load = os.getloadavg()[0]
    messages = collectives(2)
    link = fit({size: statistics.mean(times[size] for times in messages.values()) for size in messages["all_gather"]})
    trials = [compare(trial, settings[trial.setting], problems, seconds, link) for trial in TRIALS]
    return {"load_before": load, "link": {"alpha": link.alpha, "beta": link.beta}, "trials": trials}


def show(trials: list[dict[str, Any]], console: Console) -> None:
    """The table of the comparison."""
    table = Table(title=f"Jobs of {trials[0]['problems']} problems on this machine: measured -> simulated")
    for column in ("data x branch", "setting", "forwards", "steps, longest replica", "processor s", "seconds"):
        table.add_column(column, justify="right")
    table.add_column("by t(M) before, after", justify="right")
    for one in trials:
        real, made = one["measured"], one["simulated"]
        pairs = [
            (real["forwards"], made["forwards"]),
            (max(real["steps"]), max(made["steps"])),
            (real["processor_s"], made["processor_s"]),
            (real["seconds"], made["seconds"]),
        ]
        shown = [f"{a:,.1f} -> {b:,.1f} ({b / a - 1:+.1%})" for a, b in pairs]
        spread = ", ".join(f"{s:.1f}" for s in made["seconds_before_and_after"])
        table.add_row(f"{one['data']} x {one['branch']}", one["setting"], *shown, spread)
    console.print(table)
