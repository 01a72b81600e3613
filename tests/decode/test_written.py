"""How tokens were written, as the engine tells it, against naive engines that watch themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.request import Generation, Request
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Communicator, Solo
from tests.decode.oracle import Oracle, Record, Records
from tests.engine.naive import Naive
from tests.engine.ranks import on_ranks
from tests.engine.test_causal import attend_causally, causal, requests_of
from tests.engine.test_loop import BASE, random_requests
from tests.strategies import engine_configs

Told = dict[int, tuple[float, int, str]]


def watched(oracle: Oracle) -> Told:
    """What the oracle's steps write, by position, filled while it runs."""
    told: Told = {}
    last: dict[int, Record] = {}
    step_of = oracle.step

    def step(records: Records, verified: Mapping[tuple[int, int], Record] | None = None) -> None:
        chain, number = list(oracle.chain), len(oracle.wins) + 1
        oracle.proofs.clear()
        edits = [dict(edit) for edit in oracle.edits]
        records = [records[branch] for branch in range(len(edits))]
        step_of(records, verified)
        branch, brought = oracle.wins[-1], oracle.proofs
        accepted = oracle.accepted[-1] if oracle.config.verify == "agreement" else 0
        for position, _ in oracle.last_filled:
            place = [drafted for drafted, _ in chain].index(position) if position in dict(chain) else len(chain)
            if place < len(chain) and place <= accepted and position in brought:
                told[position] = oracle.proofs[position][1], number, "accepted" if place < accepted else "bonus"
            elif oracle.config.verify == "confidence" and position in edits[branch]:
                told[position] = last[position][1], number, "accepted"
            else:
                told[position] = records[branch][position][1], number, "filled"
        for position, _ in oracle.last_edited:
            told[position] = records[branch][position][1], number, "edited"
        last.clear()
        last.update(records[branch])

    oracle.step = step  # type: ignore[method-assign]
    return told


def generated(
    model: Transformer, config: DecodeConfig, requests: list[Request], comm: Communicator | None = None, **options: Any
) -> dict[int, Generation]:
    engine = Engine(model, config, comm or Solo(), EngineConfig(**options))
    return {g.request.index: g for g in engine.generate(requests)}


def asking(requests: list[Request]) -> list[Request]:
    return [replace(request, token_steps=True) for request in requests]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=engine_configs(BASE), seed=st.integers(0, 10**6))
def test_masked_as_the_naive_engine_saw_it(small_model: Transformer, config: DecodeConfig, seed: int) -> None:
    requests = asking(random_requests(seed, 3, 18))
    for index, generation in generated(small_model, config, requests, max_sequences=2).items():
        naive = Naive(small_model, config, list(requests[index].prompt), requests[index].max_new_tokens)
        told = watched(naive.oracle)
        tokens, wins = naive.generate()
        if naive.near_tie:
            continue
        assert generation.forwards == len(wins)
        assert generation.tokens == tokens[: len(generation.tokens)]
        assert generation.written is not None
        assert len(generation.written) == len(generation.tokens)
        for position, found in enumerate(generation.written, naive.oracle.known):
            probability, step, way = told[position]
            assert found[1:] == (step, way), position
            assert found.probability == pytest.approx(probability, rel=1e-4)


@pytest.mark.parametrize("drafts", [0, 4, "auto"])
def test_causal_is_the_probability_of_a_plain_forward(small_model: Transformer, drafts: int | str) -> None:
    requests = asking(requests_of(3, 6))
    found = generated(small_model, causal(drafts=drafts), requests, max_sequences=3)
    for request in requests:
        generation = found[request.index]
        assert generation.written is not None
        assert len(generation.written) == len(generation.tokens)
        tokens = torch.tensor([*request.prompt, *generation.tokens])
        with torch.no_grad():
            logits = small_model(tokens, torch.arange(len(tokens)), attend_causally) @ small_model.head_weight.T
        logits[:, small_model.config.mask_id] = -torch.inf
        wanted = logits.softmax(1)[len(request.prompt) - 1 : -1].gather(1, tokens[len(request.prompt) :, None])[:, 0]
        assert [one.probability for one in generation.written] == pytest.approx(wanted.tolist(), rel=1e-4)
        ways, steps = [one.way for one in generation.written], [one.step for one in generation.written]
        assert steps == sorted(steps)
        assert steps[0] == 1
        ended = len(generation.tokens) < request.max_new_tokens  # its end-of-text may be a draft, too
        assert 0 <= generation.work.drafts_accepted - ways.count("accepted") <= ended
        for step in set(steps):
            *before, last = [one.way for one in generation.written if one.step == step]
            assert set(before) <= {"accepted"}
            assert drafts != 0 or last == "filled"
            assert last != "accepted" or step == max(steps)
    assert drafts == 0 or any(one.way == "bonus" for g in found.values() for one in g.written or ())


@pytest.mark.parametrize(
    "config", [replace(BASE, verify="agreement", drafts=2), BASE, causal(drafts=4, draft_from="masks")]
)
def test_same_in_any_batch_and_on_more_ranks(small_model: Transformer, config: DecodeConfig) -> None:
    """Also where steps take some of the sequences, and beside requests that do not ask."""
    plain = random_requests(11, 6, 18)
    requests = [replace(request, token_steps=request.index % 2 == 0) for request in plain]
    alone = {i: (g.tokens, g.written) for i, g in generated(small_model, config, requests, max_sequences=1).items()}
    assert all((alone[request.index][1] is not None) == request.token_steps for request in requests)

    def together(comm: Communicator) -> dict[int, Any]:
        found = generated(small_model, config, requests[::-1], comm, max_sequences=4, max_rows=32)
        return {i: (g.tokens, g.written) for i, g in found.items()}

    assert together(Solo()) == alone
    for result in on_ranks(2, together):
        assert result == alone


def test_nothing_is_kept_when_nobody_asks(small_model: Transformer) -> None:
    requests = random_requests(2, 2, 18)
    kept = []

    def look(engine: Engine) -> None:
        assert engine.batch is not None
        kept.append(engine.batch.state.written is not None)

    asked = [replace(requests[0], token_steps=True), requests[1]]
    list(Engine(small_model, BASE, Solo(), EngineConfig(1), on_step=look).generate(asked))
    assert kept[0]
    assert not kept[-1]
