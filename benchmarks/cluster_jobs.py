"""Jobs of the embedded model on this machine: they give the cluster simulator its figures, and check its results.

The gains and the rows of a step do not depend on the machine, but its seconds do. The seconds, by rows, are measured
with as many processes at once as a job has ranks, one thread each, because ranks on shared cores slow each other down.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import cycle
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.answers import PUBLISHED, load, requests_of
from benchmarks.branch_scaling import ENVIRONMENT, TORCHRUN
from benchmarks.cluster_simulator import Cluster, Gains, Requests, simulate
from benchmarks.embedded import BASE, drafted
from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.request import Request
from lopa_dist.jobs.setup.build import EngineBuilder
from lopa_dist.tasks.embedded import Arithmetic

SEED = 3  # of the problems: settings were chosen on other seeds, and published figures are from other seeds
CASES = 32  # equally likely gains for each number of missing tokens
FEWEST = 20  # R is the most missing tokens that at least this many steps have; longer answers are cut into pieces
AROUND = 40  # steps with about as many missing tokens, from which the gains for a number of missing tokens are taken
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "k=0 m=4": drafted(0, 4),
    "k=0 m=10": drafted(0, 10),
    "k=1 m=10": drafted(1, 10),
    "k=3 m=10": drafted(3, 10),
    "k=7 m=10": drafted(7, 10),
    "k=0 m=6, one block": drafted(0, 6, max_active_blocks=1),
}
TRIALS, SETTING = (1, 2, 4), "k=0 m=10"  # real jobs: their numbers of data replicas, and how they decode
IN_FLIGHT = 16  # most sequences in flight on a replica of a real job
SEEDS = 10  # simulations of each real job; their means are compared with it


@dataclass
class Measured:
    """The gains of one setting, and other figures of its steps."""

    tokens: list[list[list[int]]]  # [2][R][CASES], as in `Gains`
    rows: list[list[float]]  # [2][R] mean rows of one branch
    branches: list[list[float]]  # [2][R] mean number of branches that ran
    predictions: float  # predictions that a branch reports in a step: at masked positions and in verification rows
    branch_limit: int  # the most branches of a sequence, the anchor included: k + 1
    tokens_per_forward: float
    rows_per_token: float

    def gains(self, ranks: int) -> Gains:
        """Return the gains for the simulator. Branch j runs on rank j mod `ranks`; the rows are the busiest rank's."""
        local = np.minimum(np.array(self.branches), -(-self.branch_limit // ranks))
        return Gains(np.array(self.tokens), np.array(self.rows) * local)


@dataclass
class Trace:
    """What a running sequence did in each of its steps."""

    masked: list[NDArray[np.bool_]]  # [positions] whether each is masked: before the first step, and after every step
    rows: list[int] = field(default_factory=list)  # rows of one branch in each step
    branches: list[int] = field(default_factory=list)  # branches that ran in each step


@dataclass
class Watch:
    """Follows every sequence of an engine, which calls it after each step."""

    running: dict[int, Trace] = field(default_factory=dict)  # by slot
    steps: list[tuple[bool, int, int, int, int]] = field(default_factory=list)
    """For every step of a sequence that has ended: whether the step is not the sequence's first, tokens that were
    missing before it, tokens that it gained, rows of a branch, branches."""
    predictions: list[float] = field(default_factory=list)  # per sequence and branch, in each step

    def __call__(self, engine: Engine) -> None:
        """Note a step; when a sequence ends with it, add all steps of that sequence to `steps`."""
        assert engine.ended is not None
        assert engine.batch is not None
        before, after, batch = engine.ended.step.before, engine.ended.step.after, engine.ended.rows
        state = engine.batch.state
        answers = state.answers.numpy()
        rows = batch.computed // np.maximum(before.branches, 1)
        for slot in np.flatnonzero(before.branches > 0).tolist():
            if before.step[slot] == 0:
                self.running[slot] = Trace([np.ones(answers.shape[1], bool)])
            trace = self.running[slot]
            trace.masked.append(answers[slot] == state.vocabulary.mask_id)
            trace.rows.append(int(rows[slot]))
            trace.branches.append(int(before.branches[slot]))
            if after.done[slot]:
                ends = np.flatnonzero(np.isin(answers[slot], state.vocabulary.eos_ids))
                length = int(ends[0]) + 1 if len(ends) else int(after.end[slot])
                missing = [int(masked[:length].sum()) for masked in trace.masked]
                for i, (window, ran) in enumerate(zip(trace.rows, trace.branches, strict=True)):
                    self.steps.append((i > 0, missing[i], missing[i] - missing[i + 1], window, ran))
        self.predictions.append(batch.heads.columns / max(1, int((before.branches > 0).sum())))


def config_of(name: str) -> DecodeConfig:
    """Return the decode config of the setting called `name`."""
    return DecodeConfig(**{**PUBLISHED, **BASE, **SETTINGS[name]})


def problems_of(builder: EngineBuilder, problems: int) -> list[Request]:
    """Return requests for `problems` problems of the seed `SEED`."""
    return requests_of(list(Arithmetic(problems, "held_out", SEED).items()), builder.tokenizer, BASE["max_new_tokens"])


def measure_gains(job: tuple[str, int]) -> tuple[str, Measured]:
    """Measure the gains of a setting on a number of problems; `job` has the setting's name and that number."""
    name, problems = job
    builder, watch, config = load(), Watch(), config_of(name)
    engine = builder.engine(config, EngineConfig(32), on_step=watch)
    done = list(engine.generate(problems_of(builder, problems)))
    steps = np.array(watch.steps, int)
    longest = int(np.sort(steps[:, 1])[-FEWEST])
    tokens, rows, branches = [], [], []
    for later in (0, 1):
        near = [nearly(steps[steps[:, 0] == later], missing) for missing in range(1, longest + 1)]
        cases = [np.quantile(some[:, 2], (np.arange(CASES) + 0.5) / CASES, method="nearest") for some in near]
        tokens.append([np.minimum(case, i + 1).astype(int).tolist() for i, case in enumerate(cases)])
        rows.append([round(float(some[:, 3].mean()), 2) for some in near])
        branches.append([round(float(some[:, 4].mean()), 2) for some in near])
    generated = sum(len(g.tokens) for g in done)
    per_forward, per_token = generated / sum(g.forwards for g in done), engine.statistics.rows / generated
    predictions = float(np.mean(watch.predictions))
    return name, Measured(tokens, rows, branches, predictions, config.max_branches, per_forward, per_token)


def nearly(steps: NDArray[np.int64], missing: int) -> NDArray[np.int64]:
    """Return those `steps` (rows as in `Watch.steps`) that had about `missing` tokens missing.

    These are the `AROUND` nearest ones, and all others that are as near; all steps, if there are fewer.
    """
    distance = np.abs(steps[:, 1] - missing)
    return steps[distance <= np.sort(distance)[min(AROUND, len(steps)) - 1]]


def all_gains(problems: int, processes: int) -> dict[str, Measured]:
    """Measure the gains of all settings, several `processes` at a time, and return them by the settings' names."""
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        return dict(pool.imap_unordered(measure_gains, [(name, problems) for name in SETTINGS]))


def time_steps(name: str, seconds: float, together: Barrier, found: Any) -> None:
    """Run steps with 1 to `IN_FLIGHT` sequences for `seconds`, and put a list of their (rows, seconds) into `found`.

    `name` is the setting's. The barrier `together` makes all processes begin at the same time.
    """
    builder = load()
    requests = problems_of(builder, 128)
    steps: list[tuple[int, float]] = []
    last: list[float] = []  # when the previous step ended; empty before an engine's first step

    def note(engine: Engine) -> None:
        now = time.perf_counter()
        for before in last:
            assert engine.ended is not None
            steps.append((int(engine.ended.rows.table.rows.sum()), now - before))
        last[:] = [now]

    powers = [2**n for n in range(IN_FLIGHT.bit_length())]
    engines = [builder.engine(config_of(name), EngineConfig(n), on_step=note) for n in powers]
    together.wait()
    end = time.perf_counter() + seconds
    for turn, engine in enumerate(cycle(engines)):
        last.clear()
        for _ in engine.generate(requests[turn % 64 :][: 2 * engine.options.max_sequences]):
            if time.perf_counter() > end:
                break
        if time.perf_counter() > end:
            break
    found.put(steps)


def step_times(name: str, ranks: int, seconds: float) -> dict[int, float]:
    """Measure the mean seconds of a step by its rows, host time included, while `ranks` processes run steps."""
    context = multiprocessing.get_context("spawn")
    together, found = context.Barrier(ranks), context.Queue()
    workers = [context.Process(target=time_steps, args=(name, seconds, together, found)) for _ in range(ranks)]
    for worker in workers:
        worker.start()
    steps = np.array([step for _ in workers for step in found.get()])
    for worker in workers:
        worker.join()
    bins = np.digitize(steps[:, 0], np.geomspace(1, steps[:, 0].max() + 1, 40))
    means = [steps[bins == b].mean(0) for b in np.unique(bins) if (bins == b).sum() >= 5]
    return {round(rows): float(mean) for rows, mean in means}


def by_rows(table: Mapping[int, float]) -> Callable[[float], float]:
    """Return a function from rows to seconds, by a `table` of measured points.

    Between two points it is linear, after the last point proportional to the rows, and before the first constant.
    """
    rows = np.array(sorted(table), float)
    seconds = np.array([table[int(n)] for n in rows])

    def at(count: float) -> float:
        return float(np.interp(count, rows, seconds) * max(1.0, count / rows[-1]))

    return at


def run_job(replicas: int, problems: int, folder: Path) -> dict[str, Any]:
    """Run a job as a user does, and return what it took.

    Returns:
        The lengths of the prompts and of the answers, the forwards, the steps of each replica, and the seconds.
    """
    command = [
        sys.executable, *TORCHRUN, str(replicas), "-m", "lopa_dist", f"task.limit={problems}",
        f"parallel.data={replicas}", "parallel.threads=1",
        *(f"decode.{key}={SETTINGS[SETTING][key]}" for key in ("branches", "drafts")),
        f"engine.max_sequences={IN_FLIGHT}", f"hydra.run.dir={folder}", "logging.wandb.mode=disabled",
        "logging.progress=never",
    ]  # fmt: skip
    subprocess.run(command, stdout=subprocess.DEVNULL, env=ENVIRONMENT, check=True)
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    journals = [json.loads(file.read_text().splitlines()[-1]) for file in sorted((folder / "journal").glob("001-*"))]
    return {
        "prompt": [line["usage"]["prompt_tokens"] for line in lines],
        "answer": [line["usage"]["completion_tokens"] + (line["finish_reason"] == "stop") for line in lines],
        "forwards": sum(line["usage"]["forwards"] for line in lines),
        "steps": [journal["statistics"]["steps"] for journal in journals],
        "seconds": json.loads((folder / "report.json").read_text())["decode_s"],
    }


def compare(replicas: int, measured: Measured, problems: int, seconds: float) -> dict[str, Any]:
    """Run a job on `replicas` replicas, simulate it, and return the figures of both.

    The simulation takes its step times from measurements of `seconds` seconds before the job, and as many after it.
    """
    before = step_times(SETTING, replicas, seconds)
    with tempfile.TemporaryDirectory() as folder:
        job = run_job(replicas, problems, Path(folder))
    curves = [by_rows(table) for table in (before, step_times(SETTING, replicas, seconds))]

    def step_s(rows: float, sequences: int) -> float:
        return statistics.mean(at(rows) for at in curves)

    requests = Requests(np.array(job["prompt"]), np.array(job["answer"]))
    cluster = Cluster(replicas, measured.gains(1), step_s, IN_FLIGHT)
    outcomes = [simulate(requests, cluster, seed) for seed in range(SEEDS)]
    return {
        "data": replicas,
        "setting": SETTING,
        "problems": problems,
        "measured": {key: job[key] for key in ("forwards", "steps", "seconds")},
        "simulated": {
            "forwards": statistics.mean(int(outcome.forwards.sum()) for outcome in outcomes),
            "steps": [round(float(steps), 1) for steps in np.mean([outcome.steps for outcome in outcomes], 0)],
            "seconds": statistics.mean(outcome.seconds for outcome in outcomes),
        },
    }


def validate(settings: dict[str, Measured], problems: int, seconds: float) -> dict[str, Any]:
    """Compare each of the `TRIALS` with its simulation, and return the comparisons."""
    load_before = os.getloadavg()[0]
    return {"load_before": load_before, "trials": [compare(n, settings[SETTING], problems, seconds) for n in TRIALS]}
