"""The engine against a naive one, and against itself in other batches and on more ranks."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.forecast import Choice
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.request import Generation, Request, request_key
from lopa_dist.engine.runner import Prepared, Runner
from lopa_dist.models.tensor_parallel import split
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Communicator, Solo
from lopa_dist.tasks.word_problems import problems
from tests.engine.naive import Naive, Texts, check_same
from tests.engine.ranks import on_mesh, on_ranks
from tests.strategies import engine_configs
from training.tokenizer import prompt_text

BASE = DecodeConfig(
    verify="confidence", drafts=0, branches=3, block_size=4, max_new_tokens=18, tau_conf=0.4, tau_add=0.25, tau_act=0.75
)


def random_requests(seed: int, count: int, most: int, config: DecodeConfig | None = None) -> list[Request]:
    """Of a context in which rows see what comes after them, some have a suffix."""
    rng = random.Random(seed)

    def suffix() -> list[int]:
        length = rng.choice([0, 1, 5, 40]) if config and config.scope.window_attention == "full" else 0
        return [rng.randrange(46) for _ in range(length)]

    lengths = [(rng.randrange(1, 12), rng.randrange(1, most + 1)) for _ in range(count)]
    return [
        Request(i, [rng.randrange(46) for _ in range(prompt)], limit, request_key(seed, str(i)), suffix=suffix())
        for i, (prompt, limit) in enumerate(lengths)
    ]


def texts(
    model: Transformer,
    config: DecodeConfig,
    requests: list[Request],
    comm: Communicator | None = None,
    max_sequences: int = 4,
    attention: str = "torch",
    graphs: str = "auto",
) -> Texts:
    engine = Engine(model, config, comm or Solo(), EngineConfig(max_sequences, attention=attention, graphs=graphs))
    return {g.request.index: (g.tokens, g.forwards) for g in engine.generate(requests)}


def test_agreement_without_drafts_is_plain_decoding(small_model: Transformer) -> None:
    requests = random_requests(5, 4, 18)
    plain = texts(small_model, replace(BASE, verify="confidence", branches=0, drafts=0), requests)
    assert texts(small_model, replace(BASE, verify="agreement", branches=0, drafts=0), requests) == plain


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=engine_configs(BASE), seed=st.integers(0, 10**6))
def test_same_as_naive(small_model: Transformer, config: DecodeConfig, seed: int) -> None:
    requests = random_requests(seed, 3, 18, config)
    found = texts(small_model, config, requests)
    eos = small_model.config.eos_ids[0]
    for request in requests:
        naive = Naive(small_model, config, request.prompt, request.max_new_tokens, request.suffix)
        tokens, wins = naive.generate()
        cut = tokens[: tokens.index(eos)] if eos in tokens else tokens
        assert found[request.index] == (cut, len(wins)) or naive.near_tie


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=engine_configs(BASE), seed=st.integers(0, 10**6), temperature=st.sampled_from([0.0, 0.8]))
def test_same_on_more_ranks_and_in_other_batches(
    small_model: Transformer, config: DecodeConfig, seed: int, temperature: float
) -> None:
    config = replace(config, temperature=temperature)
    requests = random_requests(seed, 5, 18, config)
    alone = texts(small_model, config, requests, max_sequences=1)
    assert texts(small_model, config, requests[::-1], max_sequences=5) == alone
    plain = texts(small_model, config, requests, max_sequences=2, attention="plain")
    check_same(small_model, config, requests, plain, alone)
    for size in (2, 3):
        for result in on_ranks(size, lambda comm: texts(small_model, config, requests, comm, 3)):
            assert result == alone


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    config=engine_configs(BASE), seed=st.integers(0, 10**6),
    rules=st.sampled_from([(0.0, 1.0), (0.8, 1.0), (0.8, 0.9)]),
    branch=st.sampled_from([1, 2]),
)  # fmt: skip
def test_same_when_the_model_is_split(
    small_model: Transformer, config: DecodeConfig, seed: int, rules: tuple[float, float], branch: int
) -> None:
    """Tensor ranks, alone and under branch ranks."""
    config = replace(config, temperature=rules[0], top_p=rules[1])
    requests = random_requests(seed, 4, 18, config)
    alone = texts(small_model, config, requests)

    def work(comm: Communicator, tensor: Communicator) -> Texts:
        model = copy.deepcopy(small_model)
        split(model, tensor)
        engine = Engine(model, config, comm, EngineConfig(3), tensor=tensor)
        found = {g.request.index: (g.tokens, g.forwards) for g in engine.generate(requests)}
        assert engine.batch is not None
        assert engine.batch.pool.keys.shape[2] == small_model.config.kv_heads // 2
        return found

    for result in on_mesh(branch, 2, work):
        check_same(small_model, config, requests, result, alone)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_embedded_problems_alone_and_together(
    embedded_model: Transformer, embedded_tokenizer: PreTrainedTokenizerFast, temperature: float
) -> None:
    config = DecodeConfig(
        verify="confidence", drafts=0, branches=3, block_size=16, max_new_tokens=64, temperature=temperature
    )
    stream = problems("held_out", 5)

    def prompt() -> list[int]:
        ids: list[int] = embedded_tokenizer(prompt_text(next(stream).question), add_special_tokens=False).input_ids
        return ids

    requests = [Request(i, prompt(), 64, request_key(3, str(i))) for i in range(8)]
    alone = texts(embedded_model, config, requests, max_sequences=1)
    assert texts(embedded_model, config, requests[::-1], max_sequences=8) == alone
    assert all(tokens for tokens, _ in alone.values())


@pytest.mark.parametrize(
    "options", [{}, {"verify": "agreement", "drafts": 3, "branches": 1}, {"context": "vanilla", "branches": 0}], ids=str
)
@pytest.mark.parametrize("attention", ["torch", "meta"])
def test_a_request_whose_predictions_are_not_numbers_ends_alone(
    small_model: Transformer, options: dict[str, Any], attention: str
) -> None:
    """Its slot and its K/V space, NaN in them, go to others, whose texts are what they would have been."""
    requests = random_requests(9, 6, 18)
    requests = [replace(r, prompt=[min(token, 44) for token in r.prompt]) for r in requests]
    model = copy.deepcopy(small_model)
    model.model.embed_tokens.weight[45] = torch.nan
    bad = [replace(r, prompt=[*r.prompt[:-1], 45]) if r.index == 1 else r for r in requests]
    config = replace(BASE, **options)

    def found(requests: list[Request], comm: Communicator) -> dict[int, Generation]:
        engine = Engine(model, config, comm, EngineConfig(2, attention=attention))
        return {g.request.index: g for g in engine.generate(requests)}

    wanted = {i: g.tokens for i, g in found(requests, Solo()).items()}
    for size in (1, 2):
        for answers in on_mesh(size, 1, lambda comm, _: found(bad, comm)):
            failed = answers.pop(1)
            assert (failed.finish_reason, failed.tokens) == ("error", [])
            assert {i: g.tokens for i, g in answers.items()} == {i: wanted[i] for i in wanted if i != 1}
            assert {g.finish_reason for g in answers.values()} <= {"stop", "length"}


@pytest.mark.parametrize(
    ("attention", "graphs"), [("torch", "never"), ("plain", "never"), ("meta", "never"), ("meta", "always")]
)
@pytest.mark.parametrize("context", ["d2f", "dual"])
def test_drafts_that_overflow_reach_no_window(
    small_model: Transformer, monkeypatch: pytest.MonkeyPatch, attention: str, graphs: str, context: str
) -> None:
    """Whatever overflows in rows of drafts in fp16, the windows' records are the same bits."""
    model = copy.deepcopy(small_model).half()
    model.model.embed_tokens.weight[45] = torch.inf
    config = replace(BASE, verify="agreement", drafts=4, branches=1, tau_conf=1.0, context=context)
    forward, compared = Runner.forward, []

    def twice(runner: Runner, prepared: Prepared) -> torch.Tensor:
        batch = prepared.batch
        if batch.drafts is None:
            return forward(runner, prepared)
        tokens, must_be_finite = batch.tokens.clone(), batch.must_be_finite()
        batch.tokens[must_be_finite] = 45
        overflown = forward(runner, prepared)
        batch.tokens[:] = tokens
        records = forward(runner, prepared)
        windows = slice(0, len(batch.heads.predictions.where))
        assert torch.equal(overflown[:, windows], records[:, windows])
        compared.append(not torch.equal(overflown, records))
        return records

    monkeypatch.setattr(Runner, "forward", twice)
    requests = [replace(r, prompt=[min(token, 44) for token in r.prompt]) for r in random_requests(9, 6, 18)]
    engine = Engine(model, config, Solo(), EngineConfig(2, attention=attention, graphs=graphs))
    assert len(list(engine.generate(requests))) == 6
    assert sum(compared) > 5


@pytest.mark.parametrize(("k", "size"), [(3, 2), (7, 4)])
@pytest.mark.parametrize("protocol", ["full", "block_causal"])
def test_traffic_is_records_and_winners_blocks_only(small_model: Transformer, protocol: str, k: int, size: int) -> None:
    """LoPA-Dist's two protocols. Both gather 12 bytes a masked position and branch (16 are allowed), and of each rank
    three words a step: its level, and what it proposes for the next step. After the pre-write, a full window's K/V is
    broadcast from the winner's rank; block-causal K/V never is.
    """
    requests = random_requests(3, 4, 18)
    config = replace(BASE, branches=k, context={"full": "d2f", "block_causal": "d2f_causal"}[protocol], tau_conf=0.9)
    shape = small_model.config
    token_bytes = 2 * shape.layers * shape.kv_heads * shape.head_dim * 4

    def work(comm: Communicator) -> tuple[Communicator, Engine]:
        engine = Engine(small_model, config, comm, EngineConfig(4))
        assert len(list(engine.generate(requests))) == 4
        return comm, engine

    ranks = on_ranks(size, work)
    gathered = sum(comm.traffic["all_gather"] for comm, _ in ranks)
    positions, steps = ranks[0][1].statistics.records, ranks[0][1].statistics.steps
    assert gathered == 12 * positions + (1 + len(Choice._fields)) * 4 * size * steps
    sent = [comm.traffic["commit"] for comm, _ in ranks]
    if protocol == "block_causal":
        assert sent == [0] * size
    else:
        assert sum(amount > 0 for amount in sent) > 1, "winners of more than one rank, or this test shows little"
        assert all(amount % token_bytes == 0 for amount in sent)
        assert sum(sent) <= token_bytes * sum(r.max_new_tokens + config.block_size for r in requests)


def test_a_list_with_other_requests_than_in_the_last_call(small_model: Transformer) -> None:
    """No request is lost for want of K/V space, and none is refused for what another one had needed."""
    engine = Engine(small_model, BASE, Solo(), EngineConfig(2, kv_tokens=120))
    requests = [Request(i, [5, 6, 7], 8, request_key(0, str(i))) for i in range(2)]
    assert len(list(engine.generate(requests))) == 2
    requests[1] = Request(1, [5 + i % 20 for i in range(90)], 8, request_key(0, "1"))
    assert len(list(engine.generate(requests))) == 2
    short, requests[1] = requests[1], Request(1, [5 + i % 20 for i in range(150)], 8, request_key(0, "1"))
    with pytest.raises(ValueError, match="kv_tokens=120"):
        engine.prepare(requests)
    requests[1] = short
    assert len(list(engine.generate(requests))) == 2
