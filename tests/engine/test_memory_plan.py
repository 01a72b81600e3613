"""What a GPU's free memory allows is planned before the first step, and no step outgrows the plan."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lopa_dist.decode import DecodeConfig
from lopa_dist.engine import memory
from lopa_dist.engine.buckets import TOP
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.kv_pool import KVPool
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.memory import FEW_ROWS, MOST_ROWS, RESERVED, Plan, TooLarge, plan, row_bytes, token_bytes
from lopa_dist.engine.static_runner import StaticRunner
from lopa_dist.models import fused
from lopa_dist.models.config import ModelConfig
from lopa_dist.models.fused import Cache
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Communicator, Solo
from tests.conftest import SMALL
from tests.engine.ranks import on_ranks
from tests.engine.test_loop import BASE, random_requests, texts
from tests.strategies import engine_configs

GIB = 2**30
LLADA = ModelConfig(
    family="LLaDA", vocab_size=126_464, hidden_size=4096, layers=32, heads=32, kv_heads=32, head_dim=128,
    intermediate_size=12_288, rms_eps=1e-5, rope_theta=500_000.0, qkv_bias=False, tied=False, shift=False,
    mask_id=126_336, eos_ids=(126_081,), pad_id=126_081, max_positions=4096,
)  # fmt: skip
NEEDS = np.full(200, 1312)  # prompts of 800 tokens and answers of 512


def planned(
    free: float, sequences: int = 64, limit: int | None = None, kv_limit: int | None = None, ready: int = 0
) -> Plan:
    return plan(LLADA, 2, int(free * GIB), NEEDS, sequences, limit, kv_limit, 1344, lambda rows: TOP, ready)


def test_what_a_token_takes() -> None:
    assert token_bytes(LLADA, 2) == 512 * 1024
    assert 0 < row_bytes(LLADA, 2) - token_bytes(LLADA, 2) < 512 * 1024


class Live(TorchDispatchMode):
    """Counts the bytes of tensors that operations made and that still exist."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()  # addresses

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for storage in (x.untyped_storage() for x in tree_leaves(out) if isinstance(x, Tensor)):
            if storage.nbytes() and storage.data_ptr() not in self.known | given:
                self.known.add(storage.data_ptr())
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.freed, storage.data_ptr(), storage.nbytes())
        return out

    def freed(self, address: int, size: int) -> None:
        self.known.discard(address)
        self.now -= size


def test_a_forward_takes_no_more_than_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the forms that run on a GPU, whose kernels are left out; their attention writes over the queries."""
    rows_triton = pytest.importorskip("lopa_dist.kernels.rows_triton", reason="needs triton", exc_type=ImportError)
    shape = replace(SMALL, hidden_size=256, heads=8, kv_heads=2, head_dim=32, intermediate_size=768, layers=3)
    rows = 1024
    model = Transformer(shape).to(torch.bfloat16).requires_grad_(False).eval()
    monkeypatch.setattr(fused, "CPU_ROWS", rows)
    for name in ("rows", "rope"):
        monkeypatch.setattr(f"lopa_dist.kernels.{name}.fused", lambda *_: True)
    monkeypatch.setattr(type(rows_triton.swiglu_kernel), "run", lambda *given, **options: None)
    keys = torch.zeros(shape.layers, rows, shape.kv_heads, shape.head_dim, dtype=torch.bfloat16)
    tokens, cache = torch.zeros(rows, dtype=torch.long), Cache(keys, keys.clone(), 0)
    network = fused.FusedTransformer(model)
    with torch.inference_mode(), Live() as live:
        network(tokens, tokens, None, cache, lambda layer, q: q, torch.arange(rows))
    planned = row_bytes(shape, 2) - token_bytes(shape, 2)
    assert 0.7 * planned < live.most / rows < planned


def test_first_forwards_get_smaller_then_fewer_sequences_run() -> None:
    """LLaDA-8B, 16 GB of weights: on 80 GB, 64 sequences of 1,312 tokens do not all fit beside 8,192 rows."""
    assert (planned(140).sequences, planned(140).row_limit) == (64, MOST_ROWS)
    found = [planned(free) for free in range(140, 4, -4)]
    assert {one.row_limit for one in found} == {MOST_ROWS, MOST_ROWS // 2, FEW_ROWS}
    assert sorted(found, key=lambda one: -one.sequences) == found
    assert all(one.sequences == 64 for one in found if one.row_limit != FEW_ROWS)
    assert found[-1].sequences < 10
    for free, one in zip(range(140, 4, -4), found, strict=True):
        assert one.bytes <= memory.SHARE * free * GIB - RESERVED


def test_requests_are_ready_where_there_is_memory_for_them() -> None:
    usual, with_ready = planned(130), planned(130, ready=16)
    assert with_ready == replace(usual, ready=16, bytes=usual.bytes + 16 * 1312 * token_bytes(LLADA, 2))
    for free in (140, 53, 40, 20):
        assert replace(planned(free, ready=16), ready=0, bytes=0) == replace(planned(free), bytes=0)
        assert planned(free, ready=16).bytes <= memory.SHARE * free * GIB - RESERVED
    assert [planned(free, ready=16).ready for free in (140, 53, 20)] == [16, 0, 0]


def test_what_the_user_says_stands() -> None:
    assert planned(30, 16, limit=6000).row_limit == 6000
    assert planned(16, 16, limit=6000).sequences < planned(16, 16).sequences
    assert planned(140, 16, limit=100_000).scratch == 16 * 1344
    assert planned(30, 64, kv_limit=20_000).sequences == 64


def test_one_that_does_not_fit_is_refused_with_what_it_takes() -> None:
    with pytest.raises(TooLarge, match=r"2 GiB .* one sequence takes 1\.53: 1312 tokens .* parallel\.tensor"):
        planned(2)


def test_on_a_cpu_nothing_is_planned() -> None:
    assert memory.free_bytes(torch.device("cpu")) is None


def watched(
    model: Transformer, config: DecodeConfig, monkeypatch: pytest.MonkeyPatch, free: int, graphs: str = "always",
    comm: Callable[[], Communicator] = Solo, requests: int = 8, **options: Any,
) -> tuple[Engine, Any]:  # fmt: skip
    """The engine with so many free bytes, and what it generates; nothing may grow."""
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    settings = EngineConfig(5, attention="meta" if graphs == "always" else "torch", graphs=graphs, **options)
    engine = Engine(model, config, comm(), settings)
    grown, grow = [], KVPool.grow
    monkeypatch.setattr(KVPool, "grow", lambda pool, held, rows: grown.append(rows) or grow(pool, held, rows))
    some = random_requests(3, requests, config.max_new_tokens)
    found = {g.request.index: (g.tokens, g.forwards) for g in engine.generate(some)}
    monkeypatch.setattr(KVPool, "grow", grow)
    assert len(grown) == 2, "keys and values were made once, and have not grown"
    return engine, found


@pytest.mark.parametrize("graphs", ["always", "never"])
@given(config=engine_configs(replace(BASE, tau_conf=0.95)), ahead=st.sampled_from([0, 3, 7]))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_step_outgrows_the_plan(
    small_model: Transformer, monkeypatch: pytest.MonkeyPatch, graphs: str, config: DecodeConfig, ahead: int
) -> None:
    """Many branches and blocks at a time: the row limit or the largest sequence bounds every forward."""
    config = replace(config, tau_add=0.0, branches=config.branches or ahead)
    monkeypatch.setattr(memory, "MOST_ROWS", 8)
    monkeypatch.setattr(memory, "FEW_ROWS", 8)
    _, found = watched(small_model, config, monkeypatch, GIB, graphs)
    assert len(found) == 8


def test_as_many_run_as_there_is_memory_for(
    small_model: Transformer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory, "RESERVED", 0)
    monkeypatch.setattr(memory, "FEW_ROWS", 40)
    config = replace(BASE, branches=0)
    wanted = texts(small_model, config, random_requests(3, 8, config.max_new_tokens))
    running = []
    caplog.set_level(logging.INFO, "lopa_dist")
    buffer = 4 * TOP * small_model.config.hidden_size
    for free in (10**8, 112_000, 92_000):
        engine, found = watched(small_model, config, monkeypatch, free + int(buffer / memory.SHARE))
        assert found == wanted
        assert engine.batch is not None
        running.append(engine.batch.most)
    assert running[0] == 5
    assert running[0] > running[1] > running[2] >= 1
    assert "5 sequences run at once, forwards have up to" in caplog.text
    assert "(not 5: too little memory)" in caplog.text
    with pytest.raises(TooLarge):
        watched(small_model, BASE, monkeypatch, 10_000)


@pytest.mark.parametrize(
    ("options", "rows"), [({}, TOP), ({"reproducible": True}, None), ({"graphs": "never"}, 0)], ids=str
)
def test_the_plan_counts_the_buffer_of_hidden_states(
    small_model: Transformer, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], rows: int | None
) -> None:
    """Larger than the ladder only where a network is one of real rows alone, and nothing without graphs."""
    monkeypatch.setattr(memory, "free_bytes", lambda device: GIB)
    engine = Engine(small_model, BASE, Solo(), EngineConfig(5, attention="meta", **{"graphs": "always"} | options))
    requests = [replace(r, prompt=[1] * 1000) for r in random_requests(3, 5, BASE.max_new_tokens)]
    space = engine.prepare(requests)
    assert space.plan.scratch is not None
    assert space.plan.scratch > TOP
    runner, shape = space.runner, small_model.config
    made = runner.hidden[: runner.room] if isinstance(runner, StaticRunner) else torch.empty(0, shape.hidden_size)
    assert len(made) == (space.plan.scratch if rows is None else rows)
    others = space.pool.scratch * token_bytes(shape, 4) + space.plan.scratch * row_bytes(shape, 4)
    assert space.plan.bytes == others + made.nbytes


def test_ranks_plan_alike(small_model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the least that any of them has."""
    monkeypatch.setattr(memory, "RESERVED", 0)
    monkeypatch.setattr(memory, "FEW_ROWS", 40)
    config = replace(BASE, branches=1)
    requests = random_requests(3, 8, config.max_new_tokens)
    wanted = texts(small_model, config, requests)
    frees = iter((10**8, 100_000))
    monkeypatch.setattr(memory, "free_bytes", lambda device: next(frees))

    def work(comm: Communicator) -> Any:
        engine = Engine(small_model, config, comm, EngineConfig(5))
        found = {g.request.index: (g.tokens, g.forwards) for g in engine.generate(requests)}
        assert engine.batch is not None
        return engine.batch.state.slots, engine.batch.scheduler.max_rows, found

    one, other = on_ranks(2, work)
    assert one == other
    assert one[2] == wanted
    assert one[0] < 5


def test_growing_is_what_these_tests_would_notice(small_model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lopa_dist.engine.memory.most_rows", lambda *of: 1)
    monkeypatch.setattr(memory, "MOST_ROWS", 1)
    with pytest.raises(AssertionError, match="have not grown"):
        watched(small_model, replace(BASE, branches=15, tau_conf=0.99), monkeypatch, GIB)


def test_unequal_requests_have_space_to_spare() -> None:
    """Of one length, they leave no gaps; where all run at once, nobody waits for a gap."""
    needs = np.arange(40, 0, -1)
    assert memory.kv_budget(needs, 17, None) == needs[:17].sum() + 2 * 40
    assert memory.kv_budget(needs, 1, None) == 40
    assert memory.kv_budget(needs, 40, None) == needs.sum()
    assert memory.kv_budget(np.full(40, 7), 17, None) == 17 * 7
    assert memory.kv_budget(needs, 17, 100) == 100


@pytest.mark.parametrize("where", ["a forward", "the warm-up"])
def test_memory_that_runs_out_all_the_same_is_said_with_what_to_do(
    small_model: Transformer, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    engine = Engine(small_model, BASE, Solo(), EngineConfig(2, attention="meta", graphs="always"))
    requests = random_requests(3, 2, BASE.max_new_tokens)
    runner = engine.prepare(requests).runner
    monkeypatch.setattr("lopa_dist.engine.static_runner.Body.run", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError, match=r"allocate 2\.00 GiB\.\n.*engine\.max_rows.*nvidia-smi"):
        list(engine.generate(requests)) if where == "a forward" else runner.warm_up()
