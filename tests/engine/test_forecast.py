"""How fast each choice of masks is expected to be."""

from __future__ import annotations

import pytest

from lopa_dist.engine.forecast import GROUP_SIZES, Choice
from lopa_dist.engine.lookahead import LookaheadPolicy
from lopa_dist.engine.step_times import StepKind, TimesByKind
from tests.engine.test_acceptance import accepted
from tests.engine.test_causal import causal


def test_acceptance_and_times_choose() -> None:
    """Where rows cost nothing, many masks; where time goes with rows and drafts fail, none."""
    policy = LookaheadPolicy(causal(drafts="auto", draft_from="masks"))
    policy.outcomes.helped = accepted(0.9)
    for rows in (1, 64, 512, 4096, 10**5):
        policy.forecast.times.measured(rows, 1.0, StepKind())
    policy.forecast.times.fit()
    best = max(policy.forecast.choices(), key=lambda choice: policy.forecast.tokens_a_second(choice, 16))
    assert best[0] == max(GROUP_SIZES)
    policy.forecast.times = TimesByKind()
    for rows in (1, 64, 512, 4096):
        policy.forecast.times.measured(rows, float(rows), StepKind())
    policy.forecast.times.fit()
    policy.outcomes.helped = accepted(0.3)
    best = max(policy.forecast.choices(), key=lambda choice: policy.forecast.tokens_a_second(choice, 16))
    assert best[:2] == (0, 1)


def test_an_answer_begins_and_ends() -> None:
    """Its first step has no drafts, and its last may bring few tokens: the shorter it is, the more that counts."""
    policy = LookaheadPolicy(causal(drafts="auto", draft_from="masks"))
    policy.outcomes.helped = accepted(0.999)
    for rows in (1, 10**5):
        policy.forecast.times.measured(rows, 200.0 + rows, StepKind())
    policy.forecast.times.fit()
    best = []
    for length in (6, 1000):
        policy.outcomes.answers = [1, length]
        assert policy.forecast.tokens_a_second(Choice(0, 1), 16) == pytest.approx(
            16 / policy.forecast.times.of(StepKind()).expected(16)
        )
        best.append(max(policy.forecast.choices(), key=lambda choice: policy.forecast.tokens_a_second(choice, 16)))
    assert 0 < best[0][0] < best[1][0]
