"""What the cluster simulator takes from this machine: gains and rows of a step, and how long a step takes by its rows.

Gains and rows come from the embedded model and depend on no machine. Seconds are measured with as many processes at
once as a job has ranks, one thread each, because ranks on shared cores hold each other up.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import cycle
from multiprocessing.synchronize import Barrier
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.cluster_simulator import Gains
from benchmarks.embedded import BASE, UNVERIFIED, drafted, requests_of
from lopa_dist.config import ModelOptions
from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.request import Request
from lopa_dist.jobs.setup.build import EngineBuilder
from lopa_dist.rows.sizes import rows_of_branch
from lopa_dist.tasks.embedded import Arithmetic

SEED = 3  # of the problems: neither those on which settings were chosen nor those of the published figures
CASES = 32  # equally likely gains that are kept for each number of missing tokens
FEWEST = 20  # steps seen with so many tokens missing or more; longer answers are taken piece by piece
AROUND = 40  # steps that the gains of a number of missing tokens are taken from: those with nearly as many missing
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "k=0 m=4": drafted(0, 4),
    "k=0 m=10": drafted(0, 10),
    "k=1 m=10": drafted(1, 10),
    "k=3 m=10": drafted(3, 10),
    "k=7 m=10": drafted(7, 10),
    "k=0 m=6, one block": drafted(0, 6, max_active_blocks=1),
}


@dataclass
class Measured:
    """The gains of one setting, and what else it says of a step."""

    tokens: list[list[list[int]]]  # [2][R][CASES], as in `Gains`
    rows: list[list[float]]  # [2][R] of one branch
    branches: list[list[float]]  # [2][R] that ran
    predictions: float  # that a branch reports a step: of masked positions and verification rows
    branch_limit: int  # k + 1
    tokens_per_forward: float
    rows_per_token: float

    def gains(self, ranks: int, busiest: bool = True) -> Gains:
        """For the simulator, branch j on rank j mod `ranks`: rows of the busiest rank, or of one on the mean."""
        branches = np.array(self.branches)
        local = np.minimum(branches, -(-self.branch_limit // ranks)) if busiest else branches / ranks
        return Gains(np.array(self.tokens), np.array(self.rows) * local)


@dataclass
class Trace:
    """A running sequence, step by step."""

    masked: list[NDArray[np.bool_]]  # [positions] before the first step and after each
    rows: list[int] = field(default_factory=list)  # of one branch
    branches: list[int] = field(default_factory=list)


@dataclass
class Watch:
    """Follows every sequence of an engine; to be called after each step."""

    running: dict[int, Trace] = field(default_factory=dict)  # by slot
    steps: list[tuple[bool, int, int, int, int]] = field(default_factory=list)
    """Of every step of a sequence: whether it is a later one than its first, missing tokens, gain, rows of a branch,
    branches."""
    predictions: list[float] = field(default_factory=list)  # a sequence and branch

    def __call__(self, engine: Engine) -> None:
        """Note a step; of sequences that end with it, count what each of their steps gained."""
        assert engine.ended is not None
        assert engine.batch is not None
        before, after, batch = engine.ended.step.before, engine.ended.step.after, engine.ended.rows
        state = engine.batch.state
        answers = state.answers.numpy()
        rows = rows_of_branch(engine.config, before, batch.begin, batch.stop)
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
        self.predictions.append(batch.columns / max(1, int((before.branches > 0).sum())))


def builder_here() -> EngineBuilder:
    """The embedded model on one thread."""
    torch.set_num_threads(1)
    builder = EngineBuilder(ModelOptions(dtype="fp32"), torch.device("cpu"))
    builder.load(warn=False)
    return builder


def problems_of(builder: EngineBuilder, problems: int) -> list[Request]:
    """Requests for problems of `SEED`."""
    return requests_of(list(Arithmetic(problems, "held_out", SEED).items()), builder.tokenizer, BASE["max_new_tokens"])


def measure_gains(job: tuple[str, int]) -> tuple[str, Measured]:
    """The gains of the setting of this name, of so many problems."""
    name, problems = job
    builder, watch = builder_here(), Watch()
    config = DecodeConfig(**{**UNVERIFIED, **BASE, **SETTINGS[name]})
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
    """Of steps as in `Watch.steps`, those with so many tokens missing, or nearly: at least `AROUND`."""
    distance = np.abs(steps[:, 1] - missing)
    return steps[distance <= np.sort(distance)[min(AROUND, len(steps)) - 1]]


def all_gains(problems: int, processes: int) -> dict[str, Measured]:
    """Of all settings."""
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        return dict(pool.imap_unordered(measure_gains, [(name, problems) for name in SETTINGS]))


def time_steps(name: str, sequences: int, seconds: float, together: Barrier, found: Any) -> None:
    """Run steps of up to so many sequences until the time is over.

    Puts rows, seconds and seconds of processor time of each step into `found`.
    """
    builder = builder_here()
    requests = problems_of(builder, 128)
    steps: list[tuple[int, float, float]] = []
    last: list[tuple[float, float]] = []  # the clocks after the step before; empty before the first of an engine

    def note(engine: Engine) -> None:
        now = time.perf_counter(), time.process_time()
        for before in last:
            assert engine.ended is not None
            steps.append((int(engine.ended.rows.rows.sum()), now[0] - before[0], now[1] - before[1]))
        last[:] = [now]

    config = DecodeConfig(**{**UNVERIFIED, **BASE, **SETTINGS[name]})
    powers = [2**n for n in range(sequences.bit_length())]
    engines = [builder.engine(config, EngineConfig(n), on_step=note) for n in powers]
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


@dataclass(frozen=True)
class StepTimes:
    """Mean seconds of a step by its rows, host time included."""

    clock: dict[int, float]
    processor: dict[int, float]  # of one rank


def step_times(name: str, sequences: int, ranks: int, seconds: float) -> StepTimes:
    """Time steps with `ranks` processes at work."""
    context = multiprocessing.get_context("spawn")
    together, found = context.Barrier(ranks), context.Queue()
    told = name, sequences, seconds, together, found
    workers = [context.Process(target=time_steps, args=told) for _ in range(ranks)]
    for worker in workers:
        worker.start()
    steps = np.array([step for _ in workers for step in found.get()])
    for worker in workers:
        worker.join()
    bins = np.digitize(steps[:, 0], np.geomspace(1, steps[:, 0].max() + 1, 40))
    means = [steps[bins == b].mean(0) for b in np.unique(bins) if (bins == b).sum() >= 5]
    return StepTimes({round(m[0]): float(m[1]) for m in means}, {round(m[0]): float(m[2]) for m in means})


def by_rows(table: Mapping[int, float]) -> Callable[[float], float]:
    """Seconds by rows: between measured points on a line, beyond the last in proportion."""
    rows = np.array(sorted(table), float)
    seconds = np.array([table[int(n)] for n in rows])

    def at(count: float) -> float:
        return float(np.interp(count, rows, seconds) * max(1.0, count / rows[-1]))

    return at
