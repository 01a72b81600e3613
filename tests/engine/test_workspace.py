"""What was made for a generation serves those after it that fit; usual graphs are there before the first step."""

from __future__ import annotations

import weakref
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch

from lopa_dist.engine.buckets import ladder
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.memory import Plan
from lopa_dist.engine.request import Request
from lopa_dist.engine.static_runner import StaticRunner
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Solo
from tests.engine.naive import Texts
from tests.engine.test_loop import BASE, random_requests, texts

STATIC = EngineConfig(4, attention="meta", graphs="always")


def generated(engine: Engine, requests: list[Request]) -> Texts:
    return {g.request.index: (g.tokens, g.forwards) for g in engine.generate(requests)}


def test_no_usual_size_is_new_in_mid_run(small_model: Transformer) -> None:
    requests = random_requests(3, 6, BASE.max_new_tokens)
    engine = Engine(small_model, BASE, Solo(), STATIC)
    runner = engine.prepare(requests).runner
    assert isinstance(runner, StaticRunner)
    assert not runner.bodies, "on a CPU there is nothing to capture"
    with torch.inference_mode():
        runner.warm_up()
    made = dict(runner.bodies), dict(runner.heads)
    assert sorted(runner.bodies) == ladder(runner.usual)
    assert sorted(runner.heads) == ladder(runner.usual_heads)
    assert generated(engine, requests) == texts(small_model, BASE, requests)
    assert engine.batch is not None
    assert engine.batch.runner is runner
    assert (runner.bodies, runner.heads) == made


def test_what_fits_finds_the_same_workspace(small_model: Transformer) -> None:
    many, few = random_requests(3, 6, BASE.max_new_tokens), random_requests(4, 2, BASE.max_new_tokens)
    few = [replace(request, prompt=request.prompt[:4]) for request in few]
    engine = Engine(small_model, BASE, Solo(), STATIC)
    assert generated(engine, many) == texts(small_model, BASE, many)
    space = engine.workspace
    list(islice(engine.generate(many), 1))  # the others are dropped
    for requests in (few, many):
        assert generated(engine, requests) == texts(small_model, BASE, requests)
        assert engine.workspace is space
    longer = [replace(request, prompt=[*request.prompt, 1]) for request in many]
    assert generated(engine, longer) == texts(small_model, BASE, longer)
    assert engine.workspace is not space


@pytest.mark.parametrize("attention", ["torch", "meta"])
def test_without_graphs_no_slot_idles(small_model: Transformer, attention: str) -> None:
    """As many sequences find the same workspace, and fewer another one."""
    requests = random_requests(2, 3, BASE.max_new_tokens)
    engine = Engine(small_model, BASE, Solo(), EngineConfig(4, attention=attention, graphs="never"))
    first = engine.prepare(requests)
    list(engine.generate(requests))
    assert engine.workspace is first, "what was prepared is used"
    assert generated(engine, requests) == texts(small_model, BASE, requests)
    assert engine.workspace is first
    list(engine.generate(requests[1:]))
    assert engine.workspace is not first


def test_with_little_memory_the_workspace_is_kept_too(
    small_model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer sequences run than should: what counts is the K/V space of those, and that the largest request fits."""
    monkeypatch.setattr(Engine, "plan", lambda engine, needs, *rest: Plan(min(2, len(needs)), None))
    requests = random_requests(3, 6, BASE.max_new_tokens)
    engine = Engine(small_model, BASE, Solo(), STATIC)
    assert generated(engine, requests) == texts(small_model, BASE, requests)
    space = engine.workspace
    assert generated(engine, requests) == texts(small_model, BASE, requests)
    assert engine.workspace is space
    large = [replace(requests[0], max_new_tokens=BASE.max_new_tokens, prompt=[1] * space.longest)] * 2
    large = [replace(request, index=index) for index, request in enumerate(large)]
    assert generated(engine, large).keys() == {0, 1}


@pytest.mark.parametrize("options", [STATIC, EngineConfig(4)], ids=["graphs", "eager"])
def test_the_old_space_is_freed_before_a_larger_one_is_made(
    small_model: Transformer, monkeypatch: pytest.MonkeyPatch, options: EngineConfig
) -> None:
    """What is planned for the new one counts on its memory."""
    engine = Engine(small_model, BASE, Solo(), options)
    few = random_requests(4, 2, BASE.max_new_tokens)
    old = weakref.ref(engine.prepare(few).pool)
    planned, alive = engine.plan, list[bool]()

    def plan(*given: Any) -> Plan:
        alive.append(old() is not None)
        return planned(*given)

    monkeypatch.setattr(engine, "plan", plan)
    engine.prepare([replace(request, prompt=request.prompt * 9) for request in few * 2])
    assert alive == [False]
