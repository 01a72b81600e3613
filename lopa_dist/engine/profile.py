"""How long a forward takes by its rows, t(M), and what follows from it (XY-Serve, section 4).

Below the knee of t(M) a step costs what reading the weights costs, whatever its rows: there lookahead branches are
free. Above it a step costs in proportion. A profile is measured once for a model on a device.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np
import torch

from lopa_dist.decode.config import DecodeConfig
from lopa_dist.decode.forward_batch import ForwardBatch
from lopa_dist.engine.buckets import ladder
from lopa_dist.engine.clock import compiles, synchronize
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.kv_pool import KVPool
from lopa_dist.engine.runner import Runner
from lopa_dist.engine.runners import USUAL_BLOCKS, Runners
from lopa_dist.kernels.attention import candidates
from lopa_dist.kernels.products import Choices
from lopa_dist.kernels.record_head import Sampling
from lopa_dist.models.transformer import Transformer

log = logging.getLogger("lopa_dist")

PREFIX = 256  # cached tokens that every row of a measured forward sees
STACKED = 8  # branches of a sequence in them
REPEATS = 5
COMPARED = (1, 8, 32, 64)  # windows of the forwards that attention back ends are compared on
MOST_BRANCHES = 15  # lookahead branches that `free_branches` may take
FREE = 1.1  # a step with lookahead branches is called free up to so many times the one without
NEARLY = 1.03  # a batch is called best from so many times the least time a row


@dataclass(frozen=True)
class Profile:
    """Seconds of a forward by its packed rows, `window` rows to a branch, with the attention that is fastest there.

    The rows of a branch are those of its blocks, the row before them and the rows of its drafts, see `usual_window`.
    """

    seconds: dict[int, float]
    window: int
    attention: dict[int, str]  # the fastest back end, by packed rows of the forwards that they were compared on

    def attention_at(self, rows: int) -> str:
        """The back end that was fastest at the measured size next to so many rows, by their ratio."""
        return self.attention[min(self.attention, key=lambda size: abs(math.log(size / rows)))]

    def at(self, rows: int) -> float:
        """Seconds of a forward of so many rows, between and beyond the measured ones in proportion."""
        sizes = sorted(self.seconds)
        if rows > sizes[-1]:
            return self.seconds[sizes[-1]] * rows / sizes[-1]
        return float(np.interp(rows, sizes, [self.seconds[size] for size in sizes]))

    def best_rows(self) -> int:
        """The smallest forward whose time a row is nearly the least: to fill steps up to, argmin t(M)/M."""
        least = min(seconds / rows for rows, seconds in self.seconds.items())
        return min(rows for rows, seconds in self.seconds.items() if seconds / rows <= NEARLY * least)

    def free_branches(self, sequences: int, ranks: int) -> int:
        """Most lookahead branches that cost next to nothing, with so many sequences in flight on so many ranks."""
        alone = self.at(self.rows(sequences, 0, ranks))
        branches = 0
        for k in range(1, MOST_BRANCHES + 1):
            if self.at(self.rows(sequences, k, ranks)) > FREE * alone:
                break
            branches = k
        return branches

    def rows(self, sequences: int, branches: int, ranks: int) -> int:
        """Packed rows of a rank's forward, of so many sequences with so many lookahead branches on so many ranks."""
        return sequences * self.window * -(-(branches + 1) // ranks)


@torch.inference_mode()
def measure(
    model: Transformer,
    config: DecodeConfig,
    options: EngineConfig,
    most_rows: int,
    budget_s: float,
    products: Choices | None = None,
) -> Profile:
    """Time forwards of the ladder's sizes, small ones first, until `budget_s` seconds are spent.

    A forward has branches of one window each, every eight of them of one sequence with `PREFIX` cached tokens; half of
    its rows are masked. The median of five runs counts, after two that do not. Where kernels are compiled, every size
    has run once before the budget begins, for the first run takes as long as hundreds of others.

    Of `options`, `attention`, `graphs` and `reproducible` are read. With attention=auto, the back ends are compared
    first, on forwards of one to 64 windows; each size is then timed with the fastest for it. One that raises (it does
    not take the model's shape, `graphs` or the memory there is) is left out, with a warning.

    Raises:
        Exception: what the only back end raised, or the last of those that there are.
    """
    window = usual_window(config, model.config.shift)
    device, dtype = model.head_weight.device, model.head_weight.dtype

    def ready(name: str, count: int) -> tuple[Runner, ForwardBatch]:
        sequences = -(-count // STACKED)
        pool = KVPool(model.config, sequences, sequences * PREFIX, dtype, device)
        for sequence in range(sequences):
            pool.allocate(sequence, PREFIX)
        runners = Runners(model, config, replace(options, attention=name, max_rows=None), products=products)
        runner = runners.make(pool, Sampling(config.confidence), sequences, PREFIX)
        return runner, windows(count, window, model.config.mask_id, device)

    def timed(name: str, count: int) -> float:
        return forward_seconds(*ready(name, count))

    def run_once(name: str, count: int) -> None:
        runner, batch = ready(name, count)
        runner.forward(runner.prepare(batch))
        synchronize(device)

    names = candidates(device, model.config.head_dim, dtype) if options.attention == "auto" else [options.attention]
    if options.reproducible:
        names = names[:1]  # the others are not
    sizes = rising(window, most_rows)
    if compiles(device):
        for rows, name in product(sizes, names):
            with suppress(Exception):  # it will be raised again where it is timed
                run_once(name, rows // window)
    deadline = time.perf_counter() + budget_s
    best: dict[int, str] = {}
    for count in COMPARED:
        if not best or (count * window <= most_rows and time.perf_counter() < deadline):
            times = compare(names, partial(timed, count=count))
            names = list(times)
            best[count * window] = min(times, key=lambda name: times[name])
    found = Profile({}, window, best)
    for rows in sizes:
        found.seconds[rows] = timed(found.attention_at(rows), rows // window)
        if time.perf_counter() > deadline:
            break
    return found


def compare(names: list[str], timed: Callable[[str], float]) -> dict[str, float]:
    """Seconds by name, of those that run."""
    times: dict[str, float] = {}
    for name in names:
        try:
            times[name] = timed(name) if len(names) > 1 else 0.0
        except Exception as error:  # torch's, Triton's and ours have nothing in common
            if name == names[-1] and not times:
                raise
            log.warning("engine.attention=%s is left out of the profile: %s", name, error)
    return times


def usual_window(config: DecodeConfig, shift: bool) -> int:
    """Return the rows of a branch in the forwards that are measured: as many as one has in a step.

    Those of its blocks; the row before them, where that is computed again (`shift`: it predicts the first one); and two
    for every draft but the first.
    """
    blocks = config.block_size * min(config.max_active_blocks or USUAL_BLOCKS, USUAL_BLOCKS)
    boundary = shift and config.boundary == "fresh" and config.window_attention == "full" and config.cache != "none"
    return blocks + boundary + 2 * config.extra_drafts


def rising(window: int, most_rows: int) -> list[int]:
    """Multiples of the window that lie near the ladder's sizes."""
    sizes = {max(1, size // window) * window for size in ladder(most_rows)}
    return sorted(sizes | {window})


def windows(count: int, window: int, mask_id: int, device: torch.device) -> ForwardBatch:
    """A batch of `count` windows, `STACKED` a sequence, of which every other position is masked."""
    numbers = np.arange(count)
    rows = np.full(count, window)
    total = count * window
    tokens = torch.full((total,), mask_id, device=device)
    head = torch.arange(0, total, 2, device=device)
    return ForwardBatch(
        sequence=numbers // STACKED, branch=numbers % STACKED, start=numbers * window, rows=rows,
        shared=np.full(count, PREFIX), first=np.zeros(count, int),
        lo=np.zeros(total, int), hi=np.full(total, window), tail=None, begin=rows * 0, stop=rows, prefill=None,
        tokens=tokens, positions=PREFIX + torch.arange(window, device=device).repeat(count),
        head_rows=head, head_slots=torch.arange(len(head), device=device),
        head_sequence=numbers.repeat(window)[::2] // STACKED, head_keys=None, local_branches=1, columns=len(head),
        where=torch.zeros_like(head), width=window, stale=None, drafts=None,
    )  # fmt: skip


def forward_seconds(runner: Runner, batch: ForwardBatch) -> float:
    """The median seconds of a forward, of those after which the device is done."""
    times = []
    for repeat in range(REPEATS + 2):
        prepared = runner.prepare(batch)
        synchronize(batch.tokens.device)
        began = time.perf_counter()
        runner.forward(prepared)
        synchronize(batch.tokens.device)
        if repeat > 1:
            times.append(time.perf_counter() - began)
    return float(np.median(times))
