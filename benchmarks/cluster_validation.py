"""Real jobs on this machine beside their simulation: forwards, steps of each replica, and seconds."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.branch_scaling import ENVIRONMENT, TORCHRUN, collectives
from benchmarks.cluster_calibration import SETTINGS, Measured, builder_here, by_rows, step_seconds
from benchmarks.cluster_simulator import Cluster, Kind, Outcome, Requests, simulate
from benchmarks.embedded import BASE
from benchmarks.latency_model import Link, Load, Model, exchange, fit

IN_FLIGHT = 16
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
    Trial(1, 2, "k=1 m=8"),
)


def run_job(trial: Trial, problems: int, folder: Path) -> dict[str, Any]:
    """Run a job as a user does; returns its requests' lengths and forwards, each replica's steps, and its seconds."""
    setting = SETTINGS[trial.setting]
    command = [
        sys.executable, *TORCHRUN, str(trial.ranks), "-m", "lopa_dist", f"task.limit={problems}",
        f"parallel.data={trial.data}", f"parallel.branch={trial.branch}", "parallel.threads=1",
        *(f"decode.{key}={setting[key]}" for key in ("branches", "drafts")), f"engine.max_sequences={IN_FLIGHT}",
        f"hydra.run.dir={folder}", "logging.wandb.mode=disabled", "logging.plots=false", "logging.progress=never",
    ]  # fmt: skip
    subprocess.run(command, stdout=subprocess.DEVNULL, env=ENVIRONMENT, check=True)
    report = json.loads((folder / "report.json").read_text())
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    replicas = [json.loads(file.read_text().splitlines()[-1]) for file in sorted((folder / "journal").glob("001-*"))]
    return {
        "prompt": [line["usage"]["prompt_tokens"] for line in lines],
        "answer": [line["usage"]["completion_tokens"] + (line["finish_reason"] == "stop") for line in lines],
        "forwards": sum(line["usage"]["forwards"] for line in lines),
        "steps": [replica["statistics"]["steps"] for replica in replicas],
        "seconds": report["decode_s"],
        "step_ms": report["step_ms"],
    }


def replica_kind(
    measured: Measured, trial: Trial, forward: Callable[[float], float], link: Link, kv_bytes: float
) -> Kind:
    """A replica of this machine's ranks."""
    model = Model(kv_bytes=kv_bytes)
    block = BASE["block_size"]

    def seconds(rows: float, sequences: int) -> float:
        if trial.branch == 1:
            return forward(rows)
        commits = measured.tokens_per_forward / block
        load = Load(measured.branch_limit, sequences, masked=measured.predictions, commits=commits, block=block)
        return forward(rows) + sum(exchange(model, link, load, trial.branch).values())

    return Kind(measured.gains(trial.branch), seconds)


def compare(trial: Trial, measured: Measured, problems: int, seconds: float, link: Link | None) -> dict[str, Any]:
    """Run a job, with steps timed before it and after it for so many seconds each, and simulate it."""
    shape = builder_here().shape
    kv_bytes = 4.0 * 2 * shape.layers * shape.kv_heads * shape.head_dim
    tables = [step_seconds(trial.setting, IN_FLIGHT, trial.ranks, seconds)]
    with tempfile.TemporaryDirectory() as folder:
        job = run_job(trial, problems, Path(folder))
    tables.append(step_seconds(trial.setting, IN_FLIGHT, trial.ranks, seconds))
    curves = [by_rows(table) for table in tables]
    requests = Requests(np.array(job.pop("prompt")), np.array(job.pop("answer")))

    def simulated(*chosen: Callable[[float], float]) -> list[Outcome]:
        kind = replica_kind(
            measured, trial, lambda rows: statistics.mean(at(rows) for at in chosen), link or Link(0, 0), kv_bytes
        )
        return [simulate(requests, Cluster(trial.data, {1: kind}, IN_FLIGHT), seed=seed) for seed in range(SEEDS)]

    found = simulated(*curves)
    return {
        "data": trial.data,
        "branch": trial.branch,
        "setting": trial.setting,
        "problems": problems,
        "measured": job,
        "simulated": {
            "forwards": statistics.mean(int(one.forwards.sum()) for one in found),
            "steps": [round(float(steps), 1) for steps in np.mean([one.steps for one in found], 0)],
            "seconds": statistics.mean(one.seconds for one in found),
            "seconds_before_and_after": [statistics.mean(one.seconds for one in simulated(at)) for at in curves],
        },
        "step_ms_by_rows": [{rows: round(1000 * s, 2) for rows, s in table.items()} for table in tables],
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
    table = Table(title=f"Jobs of {trials[0]['problems']} problems on this machine, and their simulation")
    for column in ("data x branch", "setting", "forwards", "simulated", "steps, longest replica", "simulated"):
        table.add_column(column, justify="right")
    for column in ("seconds", "simulated", "with t(M) before, after the job"):
        table.add_column(column, justify="right")
    for one in trials:
        real, made = one["measured"], one["simulated"]
        spread = ", ".join(f"{s:.1f}" for s in made["seconds_before_and_after"])
        table.add_row(
            f"{one['data']} x {one['branch']}", one["setting"],
            f"{real['forwards']}", f"{made['forwards']:.0f} ({made['forwards'] / real['forwards'] - 1:+.1%})",
            f"{max(real['steps'])}", f"{max(made['steps']):.1f} ({max(made['steps']) / max(real['steps']) - 1:+.1%})",
            f"{real['seconds']:.1f}", f"{made['seconds']:.1f} ({made['seconds'] / real['seconds'] - 1:+.1%})", spread,
        )  # fmt: skip
    console.print(table)
