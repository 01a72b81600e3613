"""How the masks of each step are chosen, by `drafts=auto` and for fixed chains."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest

from lopa_dist.decode.state import HostState
from lopa_dist.engine.chains import Chains
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.drafters import drafter_for
from lopa_dist.engine.forecast import Choice
from lopa_dist.engine.lookahead import BURST, BURSTS, EXPLORE, FAR, SELDOM, LookaheadPolicy
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.step_times import StepKind
from lopa_dist.engine.work import Work
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Solo
from lopa_dist.rows.lookahead import Lookahead
from tests.engine.test_acceptance import accepted
from tests.engine.test_causal import causal, requests_of, texts


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


def test_masks_that_take_longer_must_bring_more() -> None:
    """Beside an adapter on a CPU, steps with masks have times of their own; before they have, others' count."""
    alike, adapted = (LookaheadPolicy(causal(drafts="auto"), adapted=adapted) for adapted in (False, True))
    for policy in (alike, adapted):
        policy.outcomes.helped, policy.outcomes.bare = accepted(0.8), accepted(0.6)
    slow, fast = StepKind(adapter=True, text=True), StepKind(text=True)
    for rows in (1, 64):
        adapted.forecast.times.measured(rows, 3.0, slow)
    adapted.rank(1)
    assert adapted.forecast.times.of(fast) is adapted.forecast.times.of(slow)
    for policy in (alike, adapted):
        for rows in (1, 64):
            policy.forecast.times.measured(rows, 1.0, fast)
        policy.rank(1)
    assert alike.ranked[0].masks > 0
    assert adapted.ranked[0].masks == 0
    assert adapted.speed[Choice(0, 1, 0, 1)] == alike.speed[Choice(0, 1, 0, 1)]
    assert adapted.speed[Choice(8, 1, 0, 1)] < 0.5 * alike.speed[Choice(8, 1, 0, 1)]


def test_drafting_from_text_must_bring_more_than_it_takes_the_host() -> None:
    policy = LookaheadPolicy(causal(drafts="auto", draft_from="text"))
    policy.outcomes.bare = accepted(0.05)
    for rows in (1, 64):
        policy.forecast.times.measured(rows, 1.0, StepKind(text=True))
    policy.rank(1)
    assert policy.ranked[0].text == 1
    for rows in (1, 64):
        policy.forecast.times.measured(rows, 0.9, StepKind())
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
                   for kind, times in policy.forecast.times.times.items()}  # fmt: skip
        apart = {StepKind(True, True): {10}, StepKind(False, True): {20}}
        assert counted == (apart if adapted else {StepKind(False, True): {10, 20}}) | {StepKind(): {30}}


def test_other_kinds_of_steps_are_tried_for_a_few_steps() -> None:
    """All of them at first, so that a first bad measurement does not decide; later those that may be the best."""
    policy = LookaheadPolicy(causal(drafts="auto"), adapted=True)
    host = HostState._make(np.ones((len(HostState._fields), 1), np.int64))
    policy.outcomes.helped, policy.outcomes.bare = accepted(0.9), accepted(0.6)
    chosen = []
    for _ in range(1200):
        policy.choice = policy.propose(host)
        chosen.append(policy.forecast.kind_of(policy.choice.masks, policy.choice.text))
        policy.forecast.times.measured(1, 1.0, chosen[-1])
    usual = max(set(chosen), key=chosen.count)
    tried = [step for step, kind in enumerate(chosen, 1) if kind != usual]
    for first in (*BURSTS, 2 * SELDOM * EXPLORE):
        assert set(range(first, first + BURST)) <= set(tried)
    assert len(tried) < 0.05 * len(chosen)


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


def host(sequences: int) -> HostState:
    """Sequences that run."""
    return HostState._make([np.ones(sequences, np.int64)] * len(HostState._fields))


def test_the_time_between_two_generations_is_no_step_s(small_model: Transformer) -> None:
    engine = Engine(small_model, causal(drafts="auto"), Solo(), EngineConfig(2))
    seconds: list[float] = []
    clock, policy = count(), engine.lookahead
    policy.clock = lambda: float(next(clock))
    policy.forecast.times.measured = lambda rows, passed, kind=None: seconds.append(passed)  # type: ignore[method-assign]
    for _ in range(2):
        list(engine.generate(requests_of(3, 2)))
        clock = count(1000)
    assert set(seconds) == {1.0}


def test_of_two_choices_the_other_is_tried_too() -> None:
    """A model without masks may draft from text or not: what was left out once must not be so for ever."""
    policy = LookaheadPolicy(causal(drafts="auto", draft_from="text"))
    proposed = [policy.propose(host(2)).text for _ in range((SELDOM + 1) * EXPLORE)]
    usual = policy.ranked[0].text
    assert policy.speed[policy.ranked[1]] < FAR * policy.speed[policy.ranked[0]]
    tried = [step for step, text in enumerate(proposed, 1) if text != usual and step >= BURSTS[0]]
    assert tried == [*range(BURSTS[0], BURSTS[0] + BURST), SELDOM * EXPLORE]


def test_what_text_would_bring_is_told_while_it_does_not_draft(small_model: Transformer) -> None:
    config = causal(drafts="auto", draft_from="text")
    engine = Engine(small_model, config, Solo(), EngineConfig(2))
    requests = requests_of(3, 2)
    batch = engine.start(requests, lambda most: requests[:most], lambda begun: None)
    batch.admit()
    drafter = drafter_for(config, small_model.config)
    assert drafter
    chains = Chains(drafter, 2)
    drafter.remember([1, 2, 3, 4, 5, 6])
    for slot in range(2):
        chains.admit(slot, [1, 2], Work())
    chains.begin([0, 1])
    before = batch.state.chain_token.clone()
    found = chains.draft(batch.state, batch.host, 0.02, from_text=False, foresee=True)
    assert found is batch.host
    assert before.equal(batch.state.chain_token)
    expected = chains.expected()
    assert expected is not None
    assert (expected.drafts > 0).all()
    assert expected.ends.sum(1) == pytest.approx(1)


@pytest.mark.parametrize("sequences", [1, 4])
def test_a_job_comes_back_to_text(small_model: Transformer, sequences: int) -> None:
    """Begun without text, as where it brought nothing, it drafts from text when its answers repeat."""
    requests = requests_of(5, 4)
    plain = texts(small_model, causal(), requests)
    engine = Engine(small_model, causal(drafts="auto", draft_from="text"), Solo(), EngineConfig(sequences))
    engine.lookahead.clock = iter(np.arange(0, 1e5, 1.0)).__next__  # every step takes as long: rows cost nothing
    for _ in range(600):
        engine.lookahead.outcomes.bare.count(np.array([4]), np.array([0]), np.array([8]))
    assert engine.drafter
    for request in requests:
        engine.drafter.remember([*request.prompt, *plain[request.index]])
    found = {g.request.index: g.tokens for g in engine.generate(requests)}
    assert found == plain
    assert engine.statistics.accepted_from.total() > sum(map(len, plain.values())) / 3
