"""CUDA graphs of `gpu_first`: what is replayed is what was run, to the bit, whatever lies in padded rows.

The shapes are those of Dream-7B with few layers. On a CPU the same buffers are filled, and functions run as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.first_facts import Fact
from benchmarks.first_shapes import dtype_of, models
from benchmarks.gpu_model import random_model, windows
from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.buckets import bucket
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.kv_pool import KVPool
from lopa_dist.engine.runner import Prepared
from lopa_dist.engine.runners import Runners
from lopa_dist.engine.static_runner import HEAD, TRANSFORMER, Body, Head, Replay, StaticRunner
from lopa_dist.kernels.sampling import Sampling

LAYERS, PREFIX = 2, 48
SIZES = (32, 96, 256, 320, 512, 640, 1024, 2048)  # of buckets
REPLAYS = 50  # of one graph: a race shows in some of them only


def runner_of(device: torch.device) -> StaticRunner:
    """Return a runner over a pool of noise."""
    shape = replace(models(device)["Dream-7B"], layers=LAYERS)
    model = random_model(shape, device).to(dtype_of(device))
    pool = KVPool(shape, 1, PREFIX, model.head_weight.dtype, device)
    pool.allocate(0, PREFIX)
    pool.reserve(2048)
    pool.keys.normal_()
    pool.values.normal_()
    decode = DecodeConfig(verify="confidence", drafts=0, branches=7, block_size=256, max_new_tokens=256)
    options = EngineConfig(1, attention="meta", graphs="always")
    runner = Runners(model, decode, options).make(pool, Sampling(), 1, 2048)
    assert isinstance(runner, StaticRunner)
    return runner


def prepared(runner: StaticRunner, rows: int, seed: int) -> Prepared:
    """Return a batch of up to eight branches, ready to run."""
    branches = 8 if rows % 8 == 0 else 1
    mask_id = runner.model.config.mask_id
    batch = windows(branches, rows // branches, PREFIX, mask_id, runner.device)
    tokens = torch.randint(mask_id, (rows,), generator=torch.Generator().manual_seed(seed))
    return runner.prepare(replace(batch, tokens=tokens.to(runner.device)))


class Graphs:
    """Bodies and heads of one runner, run through `Replay` as steps do."""

    def __init__(self, device: torch.device) -> None:
        self.runner, self.gpu = runner_of(device), device.type == "cuda"

    def body(self, size: int) -> Body:
        """Return the transformer's buffers for a bucket."""
        bodies = self.runner.bodies
        bodies[size] = bodies.get(size) or Body(size, self.runner)
        return bodies[size]

    def hidden(self, ready: Prepared) -> Tensor:
        """Return the hidden states ``[R, d]`` of one more run."""
        rows = len(ready.batch.tokens)
        size = bucket(rows) or rows
        body = self.body(size)
        body.load(ready)
        self.runner.replay(body.replay, partial(body.run, self.runner), size, TRANSFORMER)
        return self.runner.hidden[:rows].clone()

    def records(self, ready: Prepared) -> Tensor:
        """Return the records of one more run of the head, over the hidden states that are there."""
        batch = ready.batch
        count = len(batch.head_slots)
        size = bucket(count) or count
        heads = self.runner.heads
        heads[size] = heads.get(size) or Head(size, self.runner)
        heads[size].load(batch.predictions)
        self.runner.replay(heads[size].replay, partial(heads[size].run, self.runner), size, HEAD)
        return heads[size].records[:count].clone()

    def captured(self, *replays: Replay) -> bool:
        """Whether all are graphs by now; on a CPU none can be."""
        return not self.gpu or all(one.graph is not None for one in replays)

    def bucket_of(self, size: int) -> dict[str, Any]:
        """A first run, a capture and replays, of two batches of a bucket."""
        equal = []
        for rows, seed in ((size, 1), (size - 5, 2)):
            ready = prepared(self.runner, rows, seed)
            fresh = Body(size, self.runner)
            fresh.load(ready)
            fresh.run(self.runner)
            wanted = self.runner.hidden[:rows].clone()
            equal += [torch.equal(self.hidden(ready), wanted) for _ in range(3)]
            records = self.records(ready)
            equal += [torch.equal(self.records(ready), records) for _ in range(3)]
        made = self.captured(self.body(size).replay, *(one.replay for one in self.runner.heads.values()))
        return {"ok": all(equal) and made, "equal": equal, "captured": made}

    def many(self, size: int, replays: int) -> dict[str, Any]:
        """One graph many times."""
        ready = prepared(self.runner, size - 3, 3)
        wanted = self.hidden(ready)
        differ = sum(not torch.equal(self.hidden(ready), wanted) for _ in range(replays))
        return {"ok": not differ, "replays": replays, "differ": differ}

    def pads(self, size: int) -> dict[str, Any]:
        """NaN in the K/V of rows that do not count, and tokens of an earlier batch in them."""
        rows, pool = size // 2 + 1, self.runner.pool
        self.hidden(prepared(self.runner, size, 4))
        ready = prepared(self.runner, rows, 5)
        wanted = self.hidden(ready)
        for of_pool in (pool.keys, pool.values):
            of_pool[:, pool.scratch + rows :] = torch.nan
        self.runner.hidden[rows:size] = torch.nan
        found = self.hidden(ready)
        for of_pool in (pool.keys, pool.values):
            of_pool[:, pool.scratch + rows :] = 0
        return {"ok": torch.equal(found, wanted), "NaN": int(found.isnan().sum())}

    def interleaved(self, sizes: tuple[int, int]) -> dict[str, Any]:
        """Two graphs that share their memory, in turn."""
        ready = [prepared(self.runner, size, size) for size in sizes]
        wanted = [self.hidden(one) for one in ready]
        equal = [
            torch.equal(self.hidden(one), before) for _ in range(3) for one, before in zip(ready, wanted, strict=True)
        ]
        return {"ok": all(equal), "equal": equal}

    def failing(self, size: int) -> dict[str, Any]:
        """A capture that cannot be, after which the others go on."""
        runner, ran, replay = self.runner, [], Replay()
        runner.insist = False

        def waits() -> None:
            ran.append(float(runner.hidden.sum()))  # the host waits for the number

        for _ in range(3):
            runner.replay(replay, waits, size, "failing")
        good = self.bucket_of(size)
        said = runner.uncaptured == ({"failing"} if self.gpu else set())
        return good | {"ok": good["ok"] and said and len(ran) >= 3, "uncaptured": sorted(runner.uncaptured)}


def graphs(device: torch.device) -> Iterator[Fact]:
    """Captures and replays."""
    made: list[Graphs] = []
    sizes = SIZES if device.type == "cuda" else (32, 96)

    def build() -> dict[str, Any]:
        made.append(Graphs(device))
        return {}

    yield "weights", build
    for size in sizes:
        yield f"{size} rows", partial(lambda size: made[0].bucket_of(size), size)
    yield "many replays", lambda: made[0].many(sizes[1], REPLAYS if device.type == "cuda" else 3)
    yield "padded rows", lambda: made[0].pads(sizes[1])
    yield "in turn", lambda: made[0].interleaved((sizes[0], sizes[1]))
    yield "a capture that fails", lambda: made[0].failing(sizes[0] + 32)
