"""Causal models: every way of looking ahead writes the text of one token at a time."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.request import Request, request_key
from lopa_dist.kernels import native
from lopa_dist.kernels.record_head import record_head
from lopa_dist.kernels.sampling import Sampling
from lopa_dist.models.tensor_parallel import split
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Communicator, Solo
from tests.engine.ranks import on_mesh, on_ranks

Texts = dict[int, list[int]]


def causal(**options: Any) -> DecodeConfig:
    """The way causal models are decoded; greedy, and with no drafts unless told otherwise."""
    given_ = {"drafts": 0, "max_new_tokens": 24} | options
    return DecodeConfig(context="causal", **{"branches": 0} | given_)


def one_at_a_time(model: Transformer, request: Request, sampling: Sampling) -> list[int] | None:
    """The oracle: the whole text goes through the model for every token, with a dense causal mask.

    None where two tokens were so close that the order of a sum may choose either.
    """
    tokens = list(request.prompt)
    with torch.no_grad():
        for position in range(request.max_new_tokens):
            hidden = model(torch.tensor(tokens), torch.arange(len(tokens)), attend_causally)[-1:]
            key = (torch.tensor([request.key]) * 0x1_0000_0001 + position + 1) * 0x1_0000_0001  # wraps at 64 bits
            record = record_head(hidden, model.head_weight, model.config.mask_id, key, sampling)
            nudged = record_head(hidden * 1.00001, model.head_weight, model.config.mask_id, key, sampling)
            if nudged[0, 0] != record[0, 0]:
                return None
            if int(record[0, 0]) in model.config.eos_ids:
                break
            tokens.append(int(record[0, 0]))
    return tokens[len(request.prompt) :]


def attend_causally(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("rhd,chd->hrc", q, k) * q.shape[2] ** -0.5
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return torch.einsum("hrc,chd->rhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def requests_of(seed: int, count: int, most: int = 24) -> list[Request]:
    """Random prompts, some of which begin alike, as far as `Request.prefix` says or further."""
    rng = random.Random(seed)
    common = [rng.randrange(46) for _ in range(30)]
    found = []
    for i in range(count):
        shared = rng.choice([0, 0, 5, 30])
        own = [rng.randrange(46) for _ in range(rng.choice([1, 1, 2, 9, 40]))]
        prefix = rng.choice([0, shared])
        found.append(
            Request(i, common[:shared] + own, rng.randrange(1, most + 1), request_key(seed, str(i)), prefix=prefix)
        )
    return [*found, *(replace(one, index=count + i, key=one.key + 1) for i, one in enumerate(found[:2]))]


def texts(
    model: Transformer,
    config: DecodeConfig,
    requests: list[Request],
    comm: Communicator | None = None,
    tensor: Communicator | None = None,
    groups: int = 1,
    **options: Any,
) -> Texts:
    engine = Engine(model, config, comm or Solo(), EngineConfig(**options), tensor=tensor)
    groups_after_several(engine, groups)
    return {g.request.index: g.tokens for g in engine.generate(requests)}


def groups_after_several(engine: Engine, groups: int) -> None:
    """Let groups of masks follow several drafts, as drafts=auto may choose."""
    if isinstance(engine.config.drafts, int):
        engine.lookahead.choice = engine.lookahead.choice._replace(groups=groups)


@st.composite
def lookaheads(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "drafts": draw(st.sampled_from([1, 2, 3, 8, 16, "auto"])),
        "draft_from": draw(st.sampled_from(["auto", "auto", "masks", "text"])),
        "branches": draw(st.sampled_from([0, 0, 1, 3, 8])),
    }


@st.composite
def engines(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "groups": draw(st.sampled_from([1, 1, 2, 4, 17])),
        "max_sequences": draw(st.sampled_from([1, 3, 8])),
        "max_rows": draw(st.sampled_from([None, None, 1, 24])),
        "attention": draw(st.sampled_from(["torch", "torch", "plain", "meta"])),
        "prefix_cache": draw(st.sampled_from(["exact", "exact", "none"])),
        "prefill_chunk": draw(st.sampled_from([2048, 1, 7])),
    }


SAMPLINGS = [
    {}, {}, {"temperature": 0.7}, {"temperature": 1.0}, {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 4},
]  # fmt: skip


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ahead=lookaheads(), engine=engines(), sampling=st.sampled_from(SAMPLINGS), seed=st.integers(0, 10**6))
def test_any_lookahead_writes_the_oracle_s_text(
    small_model: Transformer, ahead: dict[str, Any], engine: dict[str, Any], sampling: dict[str, Any], seed: int
) -> None:
    requests = requests_of(seed, 5)
    config = causal(**ahead, **sampling)
    found = texts(small_model, config, requests, **engine)
    rules = Sampling(config.confidence, config.temperature, config.top_p, config.top_k)
    for request in requests:
        assert one_at_a_time(small_model, request, rules) in (found[request.index], None)


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ahead=lookaheads(), seed=st.integers(0, 10**6))
def test_fixed_buffers(small_model: Transformer, ahead: dict[str, Any], seed: int) -> None:
    """What a GPU's graphs run over."""
    requests = requests_of(seed, 4)
    plain = texts(small_model, causal(), requests)
    assert texts(small_model, causal(**ahead), requests, attention="meta", graphs="always", groups=4) == plain


@pytest.mark.skipif(isinstance(native.found(torch.bfloat16), str), reason="no C here")
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ahead=lookaheads(), engine=engines(), sampling=st.sampled_from(SAMPLINGS), seed=st.integers(0, 10**6))
def test_in_bf16_on_a_cpu(
    small_model: Transformer, ahead: dict[str, Any], engine: dict[str, Any], sampling: dict[str, Any], seed: int
) -> None:
    """Where operations run in C, as in fp32: near ties, of which bf16 has many, too."""
    model, requests = copy.deepcopy(small_model).bfloat16(), requests_of(seed, 5)
    alone = texts(model, causal(**sampling), requests, max_sequences=1)
    assert texts(model, causal(**ahead, **sampling), requests, **engine | {"attention": "torch"}) == alone


@pytest.mark.parametrize("drafts", [3, "auto"])
def test_ranks(small_model: Transformer, drafts: int | str) -> None:
    requests = requests_of(7, 6)
    plain = texts(small_model, causal(), requests)
    config = causal(drafts=drafts)
    for found in on_ranks(3, lambda comm: texts(small_model, config, requests, comm, groups=2)):
        assert found == plain

    def work(comm: Communicator, tensor: Communicator) -> Texts:
        model = copy.deepcopy(small_model)
        split(model, tensor)
        return texts(model, config, requests, comm, tensor, groups=2)

    for found in on_mesh(2, 2, work):
        assert found == plain


def test_what_is_counted(small_model: Transformer) -> None:
    """One token at a time is a row and a forward per token; groups after every draft leave no step without drafts."""
    requests = [replace(one, max_new_tokens=24) for one in requests_of(3, 4)]

    def run(groups: int = 1, **options: Any) -> Engine:
        config = causal(stop_at_eos=False, draft_from="masks", **options)
        engine = Engine(small_model, config, Solo(), EngineConfig(max_sequences=3))
        groups_after_several(engine, groups)
        assert all(len(g.tokens) <= 24 for g in engine.generate(requests))
        return engine

    plain = run().statistics
    assert plain.rows == plain.forwards == plain.tokens_filled == 24 * len(requests)
    cold, groups = run(drafts=4).statistics, run(drafts=4, groups=5).statistics
    assert cold.tokens_filled == groups.tokens_filled == plain.tokens_filled
    assert groups.rows > cold.rows > plain.rows
    # only the first step of a sequence has no drafts, and those with one token left
    without = groups.forwards - sum(groups.proposed.values())
    assert without <= 2 * len(requests) < cold.forwards - sum(cold.proposed.values())
    assert sum(n * k for n, k in groups.accepted.items()) == groups.tokens_filled - groups.forwards


def test_the_end_of_a_text_among_the_drafts(small_model: Transformer) -> None:
    requests = requests_of(11, 8)
    eos = small_model.config.eos_ids[0]
    for stop in (True, False):
        plain = texts(small_model, causal(stop_at_eos=stop), requests)
        assert texts(small_model, causal(stop_at_eos=stop, drafts=16), requests, groups=17) == plain
        assert all(eos not in text for text in plain.values())


def test_what_cannot_go_together_is_refused() -> None:
    with pytest.raises(ValueError, match=r"decode\.branches=0"):
        replace(causal(), branches=2)
    with pytest.raises(ValueError, match=r"decode\.drafts=auto: is for causal models"):
        DecodeConfig(drafts="auto")
