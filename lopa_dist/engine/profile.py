"""How long a forward takes by its rows, t(M), and what follows from it (XY-Serve, section 4).

Below the knee of t(M) a step costs what reading the weights costs, whatever its rows: there lookahead branches are
free. Above it a step costs in proportion. A profile is measured once for a model on a device.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
import torch

from lopa_dist.decode.config import DecodeConfig
from lopa_dist.decode.forward_batch import ForwardBatch
from lopa_dist.engine.buckets import ladder
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.kv_pool import KVPool
from lopa_dist.engine.runner import Runner
from lopa_dist.engine.runners import USUAL_BLOCKS, Runners
from lopa_dist.kernels.sampling import Sampling
from lopa_dist.models.transformer import Transformer

PREFIX = 256  # cached tokens that every row of a measured forward sees
STACKED = 8  # branches of a sequence in them
REPEATS = 5
MOST_BRANCHES = 15  # lookahead branches that `free_branches` may take
FREE = 1.1  # a step with lookahead branches is called free up to so many times the one without
MOST_SEQUENCES = 1024  # that `one_block_from` considers
# of the embedded model with 6 to 10 drafts: with one block at a time a sequence has 1.5 times the block's rows in a
# forward; with as many as tau_add allows 2.5 times these rows, and 1.7 times the tokens (docs/embedded-model.md)
ONE_BLOCK, MANY_BLOCKS, MANY_BRING = 1.5, 2.5, 1.7
NEARLY = 1.03  # a batch is called best from so many times the least time a row


@dataclass(frozen=True)
class Profile:
    """Seconds of a forward by its packed rows, `window` rows to a branch.

    The rows of a branch are those of its blocks, the row before them and the rows of its drafts, see `usual_window`.
    """

    seconds: dict[int, float]
    window: int

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

    def one_block_from(self, block: int) -> int | None:
        """How many sequences it takes until those that fill one block at a time get more tokens in a second.

        Args:
            block: rows of a block, of all branches of a sequence on a rank.

        Returns:
            The number; None where it takes more than `MOST_SEQUENCES`.
        """
        for sequences in range(1, MOST_SEQUENCES + 1):
            rows = sequences * ONE_BLOCK * block
            if self.at(round(MANY_BLOCKS * rows)) > MANY_BRING * self.at(round(rows)):
                return sequences
        return None

    def rows(self, sequences: int, branches: int, ranks: int) -> int:
        """Packed rows of a rank's forward, of so many sequences with so many lookahead branches on so many ranks."""
        return sequences * self.window * -(-(branches + 1) // ranks)


@torch.inference_mode()
def measure(
    model: Transformer, config: DecodeConfig, options: EngineConfig, most_rows: int, budget_s: float
) -> Profile:
    """Time forwards of the ladder's sizes, small ones first, until `budget_s` seconds are spent.

    A forward has branches of one window each, every eight of them of one sequence with `PREFIX` cached tokens; half of
    its rows are masked. The median of five runs counts, after two that do not. Where kernels are compiled, every size
    has run once before the budget begins, for the first run takes as long as hundreds of others.

    Of `options`, `attention`, `graphs` and `reproducible` are read.
    """
    window = usual_window(config, model.config.shift)
    device, dtype = model.head_weight.device, model.head_weight.dtype
    runners = Runners(model, config, replace(options, max_rows=None))

    def ready(count: int) -> tuple[Runner, ForwardBatch]:
        sequences = -(-count // STACKED)
        pool = KVPool(model.config, sequences, sequences * PREFIX, dtype, device)
        for sequence in range(sequences):
            pool.allocate(sequence, PREFIX)
        runner = runners.make(pool, Sampling(config.confidence), sequences, PREFIX)
        return runner, windows(count, window, model.config.mask_id, device)

    sizes = rising(window, most_rows)
    for rows in sizes if compiles(device) else []:
        runner, batch = ready(rows // window)
        runner.forward(runner.prepare(batch))
        synchronize(device)
    deadline = time.perf_counter() + budget_s
    found = Profile({}, window)
    for rows in sizes:
        found.seconds[rows] = forward_seconds(*ready(rows // window))
        if time.perf_counter() > deadline:
            break
    return found


def usual_window(config: DecodeConfig, shift: bool) -> int:
    """Return the rows of a branch in the forwards that are measured: as many as one has in a step.

    Those of its blocks; the row before them, where that is computed again (`shift`: it predicts the first one); and two
    for every draft but the first.
    """
    blocks = config.block_size * min(config.max_active_blocks or USUAL_BLOCKS, USUAL_BLOCKS)
    boundary = config.stores_kv and config.boundary == "fresh" and config.window_attention == "full" and shift
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


def compiles(device: torch.device) -> bool:
    """Return whether kernels are compiled in their first run."""
    return device.type == "cuda"


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
