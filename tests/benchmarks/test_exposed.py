"""Exposed host time is counted on the path of a GPU, from a copy's arrival to the next launch, without the model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.exposed import Exposed, recorded
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.static_runner import Body
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Solo
from tests.engine.test_loop import BASE, random_requests, texts

REQUESTS = random_requests(5, 4, BASE.max_new_tokens)


def engine(model: Transformer) -> Engine:
    return Engine(model, BASE, Solo(), EngineConfig(1, attention="meta", graphs="always"))


def test_replayed_records_give_the_texts_without_the_model(
    small_model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, records = texts(small_model, BASE, REQUESTS), list[Tensor]()
    with recorded(records):
        list(engine(small_model).generate(REQUESTS))
    ticks = iter(range(10**6))
    watched, again = Exposed(lambda: float(next(ticks))), engine(small_model)
    watched.watch(again.statistics)
    monkeypatch.setattr(Body, "run", lambda *_: pytest.fail("the model runs"))
    with watched.launches(records):
        found = {g.request.index: (g.tokens, g.forwards) for g in again.generate(REQUESTS)}
    assert found == wanted
    assert len(watched.steps) == len(records) - 1 == len(watched.rows), "all but the first"
    assert set(watched.steps) == {1000.0}, "a tick from each arrival to the launch behind it"


def test_on_a_gpu_the_forward_runs(small_model: Transformer) -> None:
    watched, made = Exposed(), engine(small_model)
    watched.watch(made.statistics)
    with watched.launches():
        assert len(list(made.generate(REQUESTS))) == len(REQUESTS)
    assert len(watched.steps) == made.statistics.steps - 1
    assert min(watched.steps) >= 0
    assert torch.tensor(watched.rows).remainder(32).eq(0).all()
