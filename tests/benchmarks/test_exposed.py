"""Exposed host time is counted on the path of a GPU, from a copy's arrival to the next launch, without the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.exposed import PARTS, Exposed, recorded
from lopa_dist.engine import buckets
from lopa_dist.engine.buckets import TOP
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.loop import Engine
from lopa_dist.models.fused import FusedTransformer
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Solo
from lopa_dist.rows.window_rows import WindowRows
from tests.engine.test_loop import BASE, random_requests, texts

CONFIG = replace(BASE, branches=3)
REQUESTS = random_requests(5, 8, BASE.max_new_tokens)
LADDERS = pytest.mark.parametrize("top", [TOP, 32], ids=["in the ladder", "above it"])


def engine(model: Transformer, top: int, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """One with four sequences in flight, whose steps may have more rows than the ladder."""
    if top < TOP:
        monkeypatch.setattr(buckets, "STEPS", ((top, top),))
    return Engine(model, CONFIG, Solo(), EngineConfig(4, attention="meta", graphs="always"))


@LADDERS
def test_replayed_records_give_the_texts_without_the_model(
    small_model: Transformer, monkeypatch: pytest.MonkeyPatch, top: int
) -> None:
    """Records of the eager path: its steps are the same."""
    records = list[Tensor]()
    with recorded(records):
        wanted = texts(small_model, CONFIG, REQUESTS)
    ticks = iter(range(10**6))
    watched, again = Exposed(lambda: float(next(ticks))), engine(small_model, top, monkeypatch)
    watched.watch(again.statistics)
    monkeypatch.setattr(FusedTransformer, "project", lambda *_: pytest.fail("the model runs"))
    monkeypatch.setattr("lopa_dist.engine.runner.record_head", lambda *_: pytest.fail("the head runs"))
    with watched.launches(records):
        found = {g.request.index: (g.tokens, g.forwards) for g in again.generate(REQUESTS)}
    assert found == wanted
    assert len(watched.steps) == len(records) - 1 == len(watched.rows), "all but the first"
    assert set(watched.steps) == {1000.0}, "a tick from each arrival to the launch after it"
    assert any(rows > top for rows in watched.rows) == (top < TOP)


@LADDERS
def test_on_a_gpu_the_forward_runs(small_model: Transformer, monkeypatch: pytest.MonkeyPatch, top: int) -> None:
    watched, made = Exposed(), engine(small_model, top, monkeypatch)
    watched.watch(made.statistics)
    with watched.launches():
        assert len(list(made.generate(REQUESTS))) == len(REQUESTS)
    assert len(watched.steps) == made.statistics.steps - 1
    assert min(watched.steps) >= 0
    assert torch.tensor([rows for rows in watched.rows if rows <= top]).remainder(32).eq(0).all()


def test_parts_are_timed_where_time_is_exposed(small_model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only laying out moves."""
    now = [0.0]
    layout = WindowRows.layout

    def laid_out(rows: WindowRows, *given: Any) -> Any:
        now[0] += 1
        return layout(rows, *given)

    monkeypatch.setattr(WindowRows, "layout", laid_out)
    watched, made = Exposed(lambda: now[0], parts=True), engine(small_model, TOP, monkeypatch)
    watched.watch(made.statistics)
    with watched.launches():
        list(made.generate(REQUESTS))
    assert set(watched.steps) == {1000.0}
    assert {name: set(spent) for name, spent in watched.parts.items()} == {
        name: {1000.0 * (name == "layout")} for name in PARTS
    }
    assert {len(spent) for spent in watched.parts.values()} == {len(watched.steps)}
    assert WindowRows.layout is laid_out, "as before"
