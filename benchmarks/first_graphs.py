"""Check CUDA graphs for `gpu_first`: a replay must give the bits of the first run, whatever is in padded rows.

The shapes are those of Dream-7B, with two layers. On a CPU the same buffers are used, and functions run without graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.first_facts import Fact, Making
from benchmarks.gpu_shapes import GRAPHS, dtype_of, models, random_model, runner_of, windows
from lopa_dist.engine.runner import Prepared
from lopa_dist.engine.static_runner import Body, Replay, StaticRunner

LAYERS, PREFIX = 2, 48
SIZES = (32, 96, 256, 320, 512, 640, 1024, 2048)  # sizes of buckets
LONGEST = SIZES[-1]  # most rows of one segment
REPLAYS = 50  # replays of one graph: a race shows in only some of them


class Graphs:
    """A runner over a K/V pool of random numbers, whose transformer and record head run as they do in steps."""

    def __init__(self, device: torch.device) -> None:
        shape = replace(models(device)["Dream-7B"], layers=LAYERS)
        model = random_model(shape, device, dtype_of(device))
        runner = runner_of(model, 8, LONGEST // 8, PREFIX, GRAPHS, longest=LONGEST)
        assert isinstance(runner, StaticRunner)
        self.runner, self.gpu = runner, device.type == "cuda"

    def batch(self, rows: int, seed: int) -> Prepared:
        """Return a batch of `rows` rows, ready to run, with tokens drawn by `seed`.

        The batch has eight windows if `rows` is divisible by 8, and otherwise one.
        """
        branches = 8 if rows % 8 == 0 else 1
        mask_id = self.runner.model.config.mask_id
        batch = windows(branches, rows // branches, PREFIX, mask_id, self.runner.device)
        tokens = torch.randint(mask_id, (rows,), generator=torch.Generator().manual_seed(seed))
        return self.runner.prepare(replace(batch, tokens=tokens.to(self.runner.device)))

    def hidden(self, prepared: Prepared) -> Tensor:
        """Run the transformer on a batch once more, and return the hidden states ``[R, d]``."""
        self.runner.body(prepared)
        return self.runner.hidden[: len(prepared.batch.tokens)].clone()

    def bucket(self, size: int) -> dict[str, Any]:
        """Compare the results of a bucket's first run with those of its capture and replays, for two batches."""
        runner, equal = self.runner, []
        for rows, seed in ((size, 1), (size - 5, 2)):
            prepared = self.batch(rows, seed)
            body = Body(size, runner)
            body.load(prepared)
            body.run(runner)
            hidden = runner.hidden[:rows].clone()
            equal += [torch.equal(self.hidden(prepared), hidden) for _ in range(3)]
            records = runner.head(prepared.batch).clone()
            equal += [torch.equal(runner.head(prepared.batch), records) for _ in range(3)]
        replays = [runner.bodies[size].replay, *(head.replay for head in runner.heads.values())]
        captured = not self.gpu or all(replay.graph is not None for replay in replays)
        return {"ok": all(equal) and captured, "equal": equal, "captured": captured}

    def many(self, size: int, replays: int) -> dict[str, Any]:
        """Replay one graph many times, and count how often the results differ."""
        prepared = self.batch(size - 3, 3)
        hidden = self.hidden(prepared)
        differ = sum(not torch.equal(self.hidden(prepared), hidden) for _ in range(replays))
        return {"ok": not differ, "replays": replays, "differ": differ}

    def pads(self, size: int) -> dict[str, Any]:
        """Check that padded rows change nothing, with NaN as their K/V, and tokens of an earlier batch in them."""
        rows, pool = size // 2 + 1, self.runner.pool
        self.hidden(self.batch(size, 4))
        prepared = self.batch(rows, 5)
        hidden = self.hidden(prepared)
        for cache in (pool.keys, pool.values):
            cache[:, pool.scratch + rows :] = torch.nan
        self.runner.hidden[rows:size] = torch.nan
        again = self.hidden(prepared)
        for cache in (pool.keys, pool.values):
            cache[:, pool.scratch + rows :] = 0
        return {"ok": torch.equal(again, hidden), "NaN": int(again.isnan().sum())}

    def in_turn(self, sizes: tuple[int, int]) -> dict[str, Any]:
        """Check that two graphs that share their memory keep their results when they run in turn."""
        batches = [self.batch(size, size) for size in sizes]
        hidden = [self.hidden(batch) for batch in batches]
        equal = [
            torch.equal(self.hidden(batch), first)
            for _ in range(3)
            for batch, first in zip(batches, hidden, strict=True)
        ]
        return {"ok": all(equal), "equal": equal}

    def failing(self, size: int) -> dict[str, Any]:
        """Check that after a function that cannot be captured, other graphs still work."""
        runner, runs, replay = self.runner, [], Replay()
        runner.insist = False

        def waits() -> None:
            runs.append(float(runner.hidden.sum()))  # makes the host wait for the GPU, which no graph can hold

        for _ in range(3):
            runner.replay(replay, waits, size, "failing")
        others = self.bucket(size)
        named = runner.uncaptured == ({"failing"} if self.gpu else set())
        ok = others["ok"] and named and len(runs) >= 3
        return others | {"ok": ok, "uncaptured": sorted(runner.uncaptured)}


def graphs(device: torch.device) -> Iterator[Fact]:
    """Yield the facts about captures and replays."""
    built: list[Graphs] = []
    sizes = SIZES if device.type == "cuda" else (32, 96)

    def build() -> dict[str, Any]:
        built.append(Graphs(device))
        return {}

    yield "weights", Making(build)
    for size in sizes:
        yield f"{size} rows", partial(lambda size: built[0].bucket(size), size)
    yield "many replays", lambda: built[0].many(sizes[1], REPLAYS if device.type == "cuda" else 3)
    yield "padded rows", lambda: built[0].pads(sizes[1])
    yield "in turn", lambda: built[0].in_turn((sizes[0], sizes[1]))
    yield "a capture that fails", lambda: built[0].failing(sizes[0] + 32)
