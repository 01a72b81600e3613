"""Prompts that begin alike: computed once, kept for later, and never of influence on another's text."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.request import Request, request_key
from lopa_dist.engine.runner import Prepared, Runner
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Communicator, Solo
from tests.engine.naive import Texts, check_same
from tests.engine.ranks import on_ranks
from tests.engine.test_loop import BASE
from tests.strategies import engine_configs

QUICK = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
cached = engine_configs(BASE).filter(lambda config: config.scope.kv_is_final)


def prefixed(seed: int, count: int, prefixes: int = 2, longest: int = 14) -> list[Request]:
    """Requests with one of a few prefixes each; some prompts are a prefix and nothing else."""
    rng = random.Random(seed)
    shown = [[rng.randrange(46) for _ in range(rng.randrange(1, longest))] for _ in range(prefixes)]
    requests = []
    for i in range(count):
        prefix = rng.choice(shown)
        rest = [rng.randrange(46) for _ in range(rng.choice([0, 1, 3, 6]))]
        requests.append(Request(i, prefix + rest, rng.randrange(1, 15), request_key(seed, str(i)), None, len(prefix)))
    return requests


def run(
    model: Transformer,
    config: DecodeConfig,
    requests: list[Request],
    prefix_cache: str,
    comm: Communicator | None = None,
    max_sequences: int = 4,
    **options: object,
) -> Texts:
    settings = EngineConfig(max_sequences, prefix_cache=prefix_cache, **options)  # type: ignore[arg-type]
    engine = Engine(model, config, comm or Solo(), settings)
    return {g.request.index: (g.tokens, g.forwards) for g in engine.generate(requests)}


def one_by_one(model: Transformer, config: DecodeConfig, requests: list[Request]) -> Texts:
    """Every request in an engine of its own: nothing is shared."""
    found: Texts = {}
    for request in requests:
        found |= run(model, config, [request], "none")
    return found


@QUICK
@given(
    config=cached,
    seed=st.integers(0, 10**6),
    max_rows=st.sampled_from([None, 30]),
    ranks=st.sampled_from([1, 1, 2]),
    temperature=st.sampled_from([0.0, 0.7]),
)
def test_company_changes_no_text(
    small_model: Transformer,
    config: DecodeConfig,
    seed: int,
    max_rows: int | None,
    ranks: int,
    temperature: float,
) -> None:
    config = replace(config, temperature=temperature)
    requests = prefixed(seed, 8)
    alone = one_by_one(small_model, config, requests)
    tight = 2 * max(len(r.prompt) + r.max_new_tokens for r in requests)
    for together in on_ranks(
        ranks, lambda comm: run(small_model, config, requests[::-1], "exact", comm, max_rows=max_rows, kv_tokens=tight)
    ):
        assert together == alone
    assert run(small_model, config, requests, "exact", max_sequences=1) == alone


@QUICK
@given(config=cached, seed=st.integers(0, 10**6))
def test_an_exact_cache_changes_no_text(small_model: Transformer, config: DecodeConfig, seed: int) -> None:
    requests = prefixed(seed, 6)
    assert run(small_model, config, requests, "exact") == run(small_model, config, requests, "none")


@QUICK
@given(config=cached, seed=st.integers(0, 10**6))
def test_with_fixed_buffers(small_model: Transformer, config: DecodeConfig, seed: int) -> None:
    requests = prefixed(seed, 6)
    static = run(small_model, config, requests, "exact", attention="meta", graphs="always")
    check_same(small_model, config, requests, static, run(small_model, config, requests, "exact"))


@pytest.mark.parametrize("max_sequences", [1, 3, 9])
@pytest.mark.parametrize(
    ("context", "mode", "computed"),
    [
        ("blocks", "exact", 40 + 9 * 4),  # the fifth token begins the block that is filled
        ("blocks", "none", 9 * 44),
        ("d2f", "exact", 9 * 45),
    ],
)
def test_a_prefix_is_computed_once(
    small_model: Transformer,
    monkeypatch: pytest.MonkeyPatch,
    max_sequences: int,
    context: str,
    mode: str,
    computed: int,
) -> None:
    rows: list[int] = []
    forward = Runner.forward

    def counted(self: Runner, prepared: Prepared) -> torch.Tensor:
        batch = prepared.batch
        before = (
            batch.table.hi[:0].sum() + (batch.table.rows - (batch.table.first + batch.table.rows).clip(0)).clip(0).sum()
        )
        rows.append(
            int(before)
            * int((batch.table.shared == 0).any() or (batch.table.branch < 0).any() or (batch.table.first < -1).any())
        )
        return forward(self, prepared)

    monkeypatch.setattr(Runner, "forward", counted)
    prefix = list(range(40))
    requests = [Request(i, [*prefix, 1, 2, 3, 4, i], 6, i, None, 40) for i in range(9)]
    config = replace(BASE, context=context, branches=0)
    engine = Engine(small_model, config, Solo(), EngineConfig(max_sequences, prefix_cache=mode))
    assert len(list(engine.generate(requests))) == 9
    assert sum(rows) == computed
    assert engine.statistics.prompt_tokens == 9 * 45
    assert engine.statistics.prompt_reused == (8 * 40 if computed < 9 * 44 else 0)


def test_samples_one_after_the_other_compute_their_prompt_once(small_model: Transformer) -> None:
    prompt = list(range(20))
    requests = [Request(i, prompt, 6, i) for i in range(5)]
    config = replace(BASE, temperature=0.8)
    engine = Engine(small_model, config, Solo(), EngineConfig(1))
    found = {g.request.index: (g.tokens, g.forwards) for g in engine.generate(requests)}
    assert engine.statistics.prompt_reused == 4 * 20
    assert found == one_by_one(small_model, config, requests)


def test_unused_prefixes_make_room(small_model: Transformer) -> None:
    """Each of these prompts fills the pool; what is kept of one goes when the next one comes."""
    requests = [Request(i, [i] * 20, 6, i) for i in range(5)]
    engine = Engine(small_model, BASE, Solo(), EngineConfig(4, kv_tokens=26))
    assert len(list(engine.generate(requests))) == 5
    assert len(engine.batch.pool.prefixes) == 1
