"""Causal models: every way of looking ahead writes the text of one token at a time."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lopa_dist.decode import DecodeConfig
from lopa_dist.decode.state import HostState
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.gain import Rates, gain
from lopa_dist.engine.lookahead import BURST, BURSTS, EXPLORE, GROUP_SIZES, SELDOM, Acceptance, Choice, LookaheadPolicy
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.request import Request, request_key
from lopa_dist.engine.step_times import Kind, StepTimes, TimesByKind
from lopa_dist.kernels import native
from lopa_dist.kernels.record_head import record_head
from lopa_dist.kernels.sampling import Sampling
from lopa_dist.models.tensor_parallel import split
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Communicator, Solo
from lopa_dist.rows.lookahead import Lookahead
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


def test_acceptance_and_times_choose() -> None:
    """Where rows cost nothing, many masks; where time goes with rows and drafts fail, none."""
    policy = LookaheadPolicy(causal(drafts="auto", draft_from="masks"))
    policy.acceptance = accepted(0.9)
    for rows in (1, 64, 512, 4096, 10**5):
        policy.times.measured(rows, 1.0)
    policy.times.fit()
    best = max(policy.choices(), key=lambda choice: policy.tokens_a_second(choice, 16))
    assert best[0] == max(GROUP_SIZES)
    policy.times = TimesByKind()
    for rows in (1, 64, 512, 4096):
        policy.times.measured(rows, float(rows))
    policy.times.fit()
    policy.acceptance = accepted(0.3)
    best = max(policy.choices(), key=lambda choice: policy.tokens_a_second(choice, 16))
    assert best[:2] == (0, 1)


def test_a_second_group_stands_where_a_fixed_chain_may_well_end() -> None:
    ends = np.array([[0.1, 0.2, 0.7], [0.05, 0.9, 0.05], [0.5, 0.1, 0.4]])
    fixed = LookaheadPolicy(causal(drafts=2))
    has_group = fixed.lookahead(ends).has_group
    assert has_group is not None
    assert has_group.tolist() == [[False, True, True], [False, True, False], [True, False, True]]
    auto = LookaheadPolicy(causal(drafts="auto"))
    auto.choice = Choice(2, 1)
    has_group = auto.lookahead(ends).has_group
    assert has_group is not None
    assert has_group.sum(1).tolist() == [1, 1, 1]  # auto knows what a group costs


def test_rows_of_all_groups_count_against_masks_that_bring_nothing(small_model: Transformer) -> None:
    engine = Engine(small_model, causal(drafts=3), Solo(), EngineConfig(max_sequences=3))
    ran = []

    def look(engine: Engine) -> None:
        assert engine.ended is not None
        step, rows = engine.ended.step, engine.ended.rows
        counts = step.before.drafts + (step.before.branches > 0)
        ran.append(int(rows.table.rows[rows.table.branch >= 0].sum() - counts.sum()))

    engine.on_step.append(look)
    list(engine.generate(requests_of(5, 8)))
    assert 0 < sum(ran) <= engine.lookahead.mask_rows  # masks after an answer's limit are counted, and do not run


def test_what_other_masks_would_bring() -> None:
    """By the tokens of a forward where the number of drafts is fixed, else by this job's acceptance and times."""
    fixed = LookaheadPolicy(causal(drafts=2, draft_from="masks"))
    fixed.acceptance = accepted(0.01)
    assert gain(fixed, Rates([0.9, 0.9], 1000)) == pytest.approx(1 + 0.9 + 0.81, rel=0.05)
    assert gain(fixed, Rates([], 0)) == 1.0
    auto = LookaheadPolicy(causal(drafts="auto", draft_from="masks"))
    auto.acceptance = accepted(0.01)
    assert gain(auto, Rates([0.9] * 4, 1000)) > 1.5  # no step was measured yet: forwards count
    for rows in (1, 64, 512, 4096):
        auto.times.measured(rows, float(rows))
    auto.times.fit()
    assert gain(auto, Rates([0.3] * 4, 1000)) == pytest.approx(
        1.0, abs=0.02
    )  # where rows cost, such drafts bring nothing
    auto.times = TimesByKind()
    for rows in (1, 64, 512, 4096):
        auto.times.measured(rows, 1.0)
    auto.times.fit()
    assert gain(auto, Rates([0.9] * 16, 1000)) > 2


@pytest.mark.parametrize("drafts", [8, "auto"])
def test_masks_that_are_accepted_as_before_bring_nothing(drafts: int | str) -> None:
    """However a measurement differs from what this job sees; and rows that become dearer cost time."""
    policy = LookaheadPolicy(causal(drafts=drafts, draft_from="masks"))
    policy.acceptance = accepted(0.3)
    for rows in (1, 64):
        policy.times.measured(rows, 8.0 + rows)
    policy.times.fit()
    before = Rates([0.9, 0.85, 0.8], 500)
    assert gain(policy, before, before) == 1.0
    assert gain(policy, before, before, 1.5) < 0.99
    assert gain(policy, Rates([0.95, 0.95, 0.95], 500), before) > 1.05
    assert gain(policy, before, Rates([], 0)) > 1.1, "without a measurement before, the job's own rates count"


def test_masks_that_take_longer_must_bring_more() -> None:
    """Beside an adapter on a CPU, steps with masks have times of their own; before they have, others' count."""
    alike, adapted = (LookaheadPolicy(causal(drafts="auto"), adapted=adapted) for adapted in (False, True))
    for policy in (alike, adapted):
        policy.acceptance, policy.bare = accepted(0.8), accepted(0.6)
    slow, fast = Kind(adapter=True, text=True), Kind(text=True)
    for rows in (1, 64):
        adapted.times.measured(rows, 3.0, slow)
    adapted.rank(1)
    assert adapted.times.of(fast) is adapted.times.of(slow)
    for policy in (alike, adapted):
        for rows in (1, 64):
            policy.times.measured(rows, 1.0, fast)
        policy.rank(1)
    assert alike.ranked[0].masks > 0
    assert adapted.ranked[0].masks == 0
    assert adapted.speed[Choice(0, 1, 0, 1)] == alike.speed[Choice(0, 1, 0, 1)]
    assert adapted.speed[Choice(8, 1, 0, 1)] < 0.5 * alike.speed[Choice(8, 1, 0, 1)]


def test_drafting_from_text_must_bring_more_than_it_takes_the_host() -> None:
    policy = LookaheadPolicy(causal(drafts="auto", draft_from="text"))
    policy.bare = accepted(0.05)
    for rows in (1, 64):
        policy.times.measured(rows, 1.0, Kind(text=True))
    policy.rank(1)
    assert policy.ranked[0].text == 1
    for rows in (1, 64):
        policy.times.measured(rows, 0.9, Kind())
    policy.rank(1)
    assert policy.ranked[0].text == 0


def test_steps_of_other_kinds_are_timed_apart() -> None:
    """Steps with masks, if an adapter acts on these on a CPU, and steps without drafts from text."""
    for adapted in (False, True):
        policy = LookaheadPolicy(causal(drafts="auto"), clock=iter(range(100)).__next__, adapted=adapted)
        host = HostState._make(np.ones((len(HostState._fields), 1), np.int64))
        for masks, text, rows in ((2, 1, 10), (0, 1, 20), (0, 0, 30), (2, 1, 10), (0, 0, 30)):
            policy.choice = Choice(masks, 1, 0, text)
            policy.begin(Lookahead(masks), host, chunk=False)
            policy.rows = rows
        counted = {kind: {rows for last in times.last.values() for rows, _ in last}
                   for kind, times in policy.times.times.items()}  # fmt: skip
        apart = {Kind(True, True): {10}, Kind(False, True): {20}}
        assert counted == (apart if adapted else {Kind(False, True): {10, 20}}) | {Kind(): {30}}


def test_other_kinds_of_steps_are_tried_for_a_few_steps() -> None:
    """All of them at first, so that a first bad measurement does not decide; later those that may be the best."""
    policy = LookaheadPolicy(causal(drafts="auto"), adapted=True)
    host = HostState._make(np.ones((len(HostState._fields), 1), np.int64))
    policy.acceptance, policy.bare = accepted(0.9), accepted(0.6)
    chosen = []
    for _ in range(1200):
        policy.choice = policy.propose(host)
        chosen.append(policy.kind_of(policy.choice.masks, policy.choice.text))
        policy.times.measured(1, 1.0, chosen[-1])
    usual = max(set(chosen), key=chosen.count)
    tried = [step for step, kind in enumerate(chosen, 1) if kind != usual]
    for first in (*BURSTS, 2 * SELDOM * EXPLORE):
        assert set(range(first, first + BURST)) <= set(tried)
    assert len(tried) < 0.05 * len(chosen)


def test_an_answer_begins_and_ends() -> None:
    """Its first step has no drafts, and its last may bring few tokens: the shorter it is, the more that counts."""
    policy = LookaheadPolicy(causal(drafts="auto", draft_from="masks"))
    policy.acceptance = accepted(0.999)
    for rows in (1, 10**5):
        policy.times.measured(rows, 200.0 + rows)
    policy.times.fit()
    best = []
    for length in (6, 1000):
        policy.lengths = [1, length]
        assert policy.tokens_a_second(Choice(0, 1), 16) == pytest.approx(16 / policy.times.of(Kind()).expected(16))
        best.append(max(policy.choices(), key=lambda choice: policy.tokens_a_second(choice, 16)))
    assert 0 < best[0][0] < best[1][0]


def test_a_step_s_time_counts_for_its_rows(small_model: Transformer) -> None:
    """Those of prompts, too, as far as the step runs them: a beginning that several share runs once."""
    engine = Engine(small_model, causal(drafts="auto"), Solo(), EngineConfig(max_sequences=3))
    counted, ran = [], []

    def look(engine: Engine) -> None:
        assert engine.ended is not None
        counted.append(engine.lookahead.rows)
        ran.append(int(engine.ended.rows.table.rows.sum()))

    engine.on_step.append(look)
    list(engine.generate(requests_of(5, 8)))
    assert counted == ran


def accepted(share: float) -> Acceptance:
    found = Acceptance()
    found.accepted[:], found.tried[:] = 1000 * share, 1000
    return found


@given(share=st.floats(0.01, 0.99), drafts=st.integers(0, 16))
def test_a_chain_ends_somewhere(share: float, drafts: int) -> None:
    ends = accepted(share).ends(drafts)
    assert len(ends) == drafts + 1
    assert sum(ends) == pytest.approx(1)
    assert ends[-1] == pytest.approx(share**drafts)


def test_times_lie_between_those_measured() -> None:
    times = StepTimes()
    assert times.expected(10) == times.expected(1000)
    times.measured(100, 2.0)
    times.measured(200, 3.0)
    times.fit()
    assert times.expected(150) == 2.5
    assert 1.0 <= times.expected(50) < 2.0  # no row takes longer than the nearest one measured
    assert 3.0 < times.expected(400) <= 6.0


def test_what_cannot_go_together_is_refused() -> None:
    with pytest.raises(ValueError, match=r"decode\.branches=0"):
        replace(causal(), branches=2)
    with pytest.raises(ValueError, match=r"decode\.drafts=auto: is for causal models"):
        DecodeConfig(drafts="auto")
