"""The static path gives the eager path's text, whatever lies in padding and in slots that nothing points to."""

from __future__ import annotations

import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.buckets import TOP, bucket, ladder
from lopa_dist.engine.kv_pool import KVPool
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.profile import PREFIX, windows
from lopa_dist.engine.request import Request
from lopa_dist.engine.runners import Runners
from lopa_dist.engine.static_runner import Body, Head, StaticRunner
from lopa_dist.kernels.record_head import Sampling
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Solo
from tests.engine.ranks import on_ranks
from tests.engine.test_loop import BASE, configs, random_requests, texts

Texts = dict[int, tuple[list[int], int]]


def poison(engine: Engine) -> None:
    """NaN wherever the next step has no business: padding, scratch, slots behind what is committed, old results."""
    runner = engine.flight.runner
    assert isinstance(runner, StaticRunner)
    pool, lengths = runner.pool, engine.flight.state.lengths()
    unused = torch.ones(pool.keys.shape[1], dtype=torch.bool)
    for slot, (begin, end) in pool.ranges.items():
        tokens = np.arange(lengths.prompt[slot] + max(lengths.committed[slot], 0))
        unused[pool.slots(np.full(len(tokens), slot), tokens)] = False
        if engine.config.cache == "dual":
            unused[begin:end] = False
    pool.keys[:, unused] = torch.nan
    pool.values[:, unused] = torch.nan
    runner.hidden.fill_(torch.nan)
    for head in runner.heads.values():
        head.records.fill_(-1)
    for body in runner.bodies.values():
        body.tokens.fill_(3)
        body.positions.fill_(500)
        body.plan.workspace.results.fill_(torch.nan)
        body.plan.workspace.lse.fill_(torch.nan)


def static_texts(
    model: Transformer, config: DecodeConfig, requests: list[Request], comm: Solo | None = None, **options: int
) -> Texts:
    engine = Engine(model, config, comm or Solo(), 4, "meta", poison, graphs="always", **options)
    found = {g.request.index: (g.tokens, g.forwards) for g in engine.generate(requests)}
    assert isinstance(engine.flight.runner, StaticRunner)
    return found


@given(config=configs(), seed=st.integers(0, 10**6), temperature=st.sampled_from([0.0, 0.8]))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_same_text_as_the_eager_path_among_nan(
    small_model: Transformer, config: DecodeConfig, seed: int, temperature: float
) -> None:
    config = replace(config, temperature=temperature)
    requests = random_requests(seed, 5, config.max_new_tokens)
    assert static_texts(small_model, config, requests) == texts(small_model, config, requests)


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_same_text_on_two_ranks_and_with_few_rows_a_step(small_model: Transformer, top_p: float) -> None:
    config = replace(BASE, temperature=0.7, top_p=top_p)
    requests = random_requests(3, 6, config.max_new_tokens)
    wanted = texts(small_model, config, requests)
    assert static_texts(small_model, config, requests, max_rows=40) == wanted
    for found in on_ranks(2, lambda comm: static_texts(small_model, config, requests, comm)):
        assert found == wanted


@pytest.mark.parametrize("top", [4, 32])
def test_steps_above_the_ladder_run_without_a_graph(
    small_model: Transformer, monkeypatch: pytest.MonkeyPatch, top: int
) -> None:
    monkeypatch.setattr("lopa_dist.engine.buckets.STEPS", ((top, top),))
    captured: list[Body | Head] = []
    replay = "lopa_dist.engine.static_runner.Replay"
    monkeypatch.setattr(replay, lambda run, *_: captured.append(run.func.__self__) or run)
    requests = random_requests(5, 6, BASE.max_new_tokens)
    assert static_texts(small_model, BASE, requests) == texts(small_model, BASE, requests)
    assert captured
    assert all(len(one.records if isinstance(one, Head) else one.tokens) == top for one in captured)


class Graph:
    """What `Replay` is on a GPU, with torch's rule: a pool whose graphs are all gone takes no more."""

    def __init__(self, run: Any, device: torch.device, memory: SimpleNamespace) -> None:
        assert memory.live or not memory.used
        memory.used, memory.live, self.memory = True, memory.live + 1, memory
        self.owner, self.runner = weakref.ref(run.func.__self__), weakref.ref(run.args[0])

    def __call__(self) -> None:
        self.owner().run(self.runner())

    def __del__(self) -> None:
        self.memory.live -= 1


def test_no_graph_is_put_into_a_dead_pool(small_model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[SimpleNamespace] = []

    def new_memory(_: StaticRunner) -> SimpleNamespace:
        made.append(SimpleNamespace(live=0, used=False))
        return made[-1]

    monkeypatch.setattr(StaticRunner, "new_memory", new_memory)
    monkeypatch.setattr("lopa_dist.engine.static_runner.Replay", Graph)
    pool = KVPool(small_model.config, 2, 2 * PREFIX, torch.float32, torch.device("cpu"))
    for sequence in range(2):
        pool.allocate(sequence, PREFIX)
    runner = Runners(small_model, BASE, "meta", "always", Solo()).make(pool, Sampling(), 2, PREFIX)
    for count in (1, 2, 16, 1):  # 32 rows, 32, 128, 32
        runner.forward(runner.prepare(windows(count, 8, small_model.config.mask_id, torch.device("cpu"))))
    assert [memory.live for memory in made if memory.used] == [0, 4], "the first graphs were dropped"


def test_graphs_are_refused_where_they_cannot_be_had(small_model: Transformer) -> None:
    with pytest.raises(ValueError, match=r"engine\.graphs=always: graphs need engine\.attention=meta"):
        Engine(small_model, BASE, Solo(), 2, "torch", graphs="always")


@given(st.integers(0, TOP + 500))
def test_buckets_hold_their_rows_and_waste_little(rows: int) -> None:
    size = bucket(rows)
    if rows > TOP:
        assert size is None
        return
    assert size is not None
    assert size >= rows
    assert size % 16 == 0
    assert size in ladder()
    assert size - max(rows, 1) < max(32, rows / 4)
