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
from benchmarks.embedded import BASE, drafted, requests_of
from lopa_dist.config import ModelOptions
from lopa_dist.decode import DecodeConfig
from lopa_dist.decode.draft_rows import drafts_with_rows
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.request import Request
from lopa_dist.jobs.build import EngineBuilder
from lopa_dist.tasks.arithmetic import Arithmetic

SEED = 3  # of the problems: neither those on which settings were chosen nor those of the published figures
CASES = 32  # equally likely gains that are kept for each number of missing tokens
FEWEST = 20  # steps seen with so many tokens missing or more; longer answers are taken piece by piece
AROUND = 150  # steps that the gains of a number of missing tokens are taken from: those with nearly as many missing
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "k=0 m=4": drafted(0, 4),
    "k=0 m=10": drafted(0, 10),
    "k=1 m=8": drafted(1, 8),
    "k=3 m=4": drafted(3, 4),
    "k=7 m=1": drafted(7, 1),
    "k=7 m=4": drafted(7, 4),
    "k=0 m=6, one block": drafted(0, 6, max_active_blocks=1),
}


@dataclass
class Measured:
    """The gains of one setting, and what else it says of a step."""

    tokens: list[list[int]]  # [R][CASES]
    rows: list[float]  # [R] of one branch
    branches: list[float]  # [R] that ran
    predictions: float  # that a branch reports a step: of masked positions and verification rows
    branch_limit: int  # k + 1
    tokens_per_forward: float
    rows_per_token: float

    def gains(self, ranks: int) -> Gains:
        """For the simulator, with the branches on so many ranks."""
        most = -(-self.branch_limit // ranks)
        rows = np.array(self.rows) * np.minimum(self.branches, most)
        return Gains(np.array(self.tokens), rows)


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
    steps: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Missing tokens, gain, rows of a branch and branches of every step of a sequence."""
    predictions: list[float] = field(default_factory=list)  # a sequence and branch

    def __call__(self, engine: Engine) -> None:
        """Note a step; of sequences that end with it, count what each of their steps gained."""
        assert engine.ended is not None
        assert engine.batch is not None
        before, after, batch = engine.ended.before, engine.ended.after, engine.ended.rows
        state = engine.batch.state
        answers = state.answers.numpy()
        rows = batch.stop - batch.begin + 2 * drafts_with_rows(engine.config, before)
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
                for was, now, rows_, ran in zip(missing, missing[1:], trace.rows, trace.branches, strict=False):
                    self.steps.append((was, was - now, rows_, ran))
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
    config = DecodeConfig(**{**BASE, **SETTINGS[name]})
    engine = builder.engine(config, EngineConfig(32), on_step=watch)
    done = list(engine.generate(problems_of(builder, problems)))
    steps = np.array(watch.steps)
    steps = steps[steps[:, 0] > 0]
    tokens, rows, branches = [], [], []
    for missing in range(1, int(np.sort(steps[:, 0])[-FEWEST]) + 1):
        distance = np.abs(steps[:, 0] - missing)
        near = steps[distance <= np.sort(distance)[min(AROUND, len(steps)) - 1]]
        cases = np.quantile(near[:, 1], (np.arange(CASES) + 0.5) / CASES, method="nearest")
        tokens.append(np.minimum(cases, missing).tolist())
        rows.append(round(float(near[:, 2].mean()), 2))
        branches.append(round(float(near[:, 3].mean()), 2))
    generated = sum(len(g.tokens) for g in done)
    per_forward, per_token = generated / sum(g.forwards for g in done), engine.statistics.rows / generated
    predictions = float(np.mean(watch.predictions))
    return name, Measured(tokens, rows, branches, predictions, config.max_branches, per_forward, per_token)


def all_gains(problems: int, processes: int) -> dict[str, Measured]:
    """Of all settings."""
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        return dict(pool.imap_unordered(measure_gains, [(name, problems) for name in SETTINGS]))


def time_steps(name: str, sequences: int, seconds: float, together: Barrier, found: Any) -> None:
    """Run steps of up to so many sequences until the time is over; puts (rows, seconds) of each into `found`."""
    builder = builder_here()
    requests = problems_of(builder, 128)
    steps: list[tuple[int, float]] = []
    clock = [0.0]

    def note(engine: Engine) -> None:
        now = time.perf_counter()
        if clock[0]:
            assert engine.ended is not None
            steps.append((int(engine.ended.rows.rows.sum()), now - clock[0]))
        clock[0] = now

    config = DecodeConfig(**{**BASE, **SETTINGS[name]})
    powers = [2**n for n in range(sequences.bit_length())]
    engines = [builder.engine(config, EngineConfig(n), on_step=note) for n in powers]
    together.wait()
    end = time.perf_counter() + seconds
    for turn, engine in enumerate(cycle(engines)):
        clock[0] = 0.0
        few = requests[turn % 64 :][: 2 * engine.options.max_sequences]
        for _ in engine.generate(few):
            if time.perf_counter() > end:
                break
        if time.perf_counter() > end:
            break
    found.put(steps)


def step_seconds(name: str, sequences: int, ranks: int, seconds: float) -> dict[int, float]:
    """Mean seconds of a step by its rows, host time included, with `ranks` processes at work."""
    context = multiprocessing.get_context("spawn")
    together, found = context.Barrier(ranks), context.Queue()
    workers = [
        context.Process(target=time_steps, args=(name, sequences, seconds, together, found)) for _ in range(ranks)
    ]
    for worker in workers:
        worker.start()
    steps = np.array([step for _ in workers for step in found.get()])
    for worker in workers:
        worker.join()
    edges = np.geomspace(1, steps[:, 0].max() + 1, 40)
    bins = np.digitize(steps[:, 0], edges)
    return {
        round(steps[bins == b, 0].mean()): float(steps[bins == b, 1].mean())
        for b in np.unique(bins)
        if (bins == b).sum() >= 5
    }


def by_rows(table: Mapping[int, float]) -> Callable[[float], float]:
    """Seconds by rows: between measured points on a line, beyond the last in proportion."""
    rows = np.array(sorted(table), float)
    seconds = np.array([table[int(n)] for n in rows])

    def at(count: float) -> float:
        return float(np.interp(count, rows, seconds) * max(1.0, count / rows[-1]))

    return at
