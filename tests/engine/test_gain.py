"""What other masks would bring a job."""

from __future__ import annotations

from copy import copy

import numpy as np
import pytest

from lopa_dist.engine.gain import Rates, gain
from lopa_dist.engine.lookahead import LookaheadPolicy
from lopa_dist.engine.step_times import StepKind, TimesByKind
from tests.engine.test_acceptance import accepted
from tests.engine.test_causal import causal


def test_what_other_masks_would_bring() -> None:
    """By the tokens of a forward where the number of drafts is fixed, else by this job's acceptance and times."""
    fixed = LookaheadPolicy(causal(drafts=2, draft_from="masks"))
    fixed.outcomes.helped = accepted(0.01)
    assert gain(fixed, Rates([0.9, 0.9], 1000)) == pytest.approx(1 + 0.9 + 0.81, rel=0.05)
    assert gain(fixed, Rates([], 0)) == 1.0
    auto = LookaheadPolicy(causal(drafts="auto", draft_from="masks"))
    auto.outcomes.helped = accepted(0.01)
    assert gain(auto, Rates([0.9] * 4, 1000)) > 1.5  # no step was measured yet: forwards count
    for rows in (1, 64, 512, 4096):
        auto.forecast.times.measured(rows, float(rows), StepKind())
    auto.forecast.times.fit()
    # where rows cost, such drafts bring nothing
    assert gain(auto, Rates([0.3] * 4, 1000)) == pytest.approx(1.0, abs=0.02)
    auto.forecast.times = TimesByKind()
    for rows in (1, 64, 512, 4096):
        auto.forecast.times.measured(rows, 1.0, StepKind())
    auto.forecast.times.fit()
    assert gain(auto, Rates([0.9] * 16, 1000)) > 2


@pytest.mark.parametrize("drafts", [8, "auto"])
def test_masks_that_are_accepted_as_before_bring_nothing(drafts: int | str) -> None:
    """However a measurement differs from what this job sees; and rows that become dearer cost time."""
    policy = LookaheadPolicy(causal(drafts=drafts, draft_from="masks"))
    policy.outcomes.helped = accepted(0.3)
    for rows in (1, 64):
        policy.forecast.times.measured(rows, 8.0 + rows, StepKind())
    policy.forecast.times.fit()
    before = Rates([0.9, 0.85, 0.8], 500)
    assert gain(policy, before, before) == 1.0
    assert gain(policy, before, before, 1.5) < 0.99
    assert gain(policy, Rates([0.95, 0.95, 0.95], 500), before) > 1.05
    noisy = copy(policy)
    noisy.forecast = copy(policy.forecast)
    noisy.forecast.times = TimesByKind()
    for rows in (1, 64):
        noisy.forecast.times.measured(rows, 80.0 - rows, StepKind())  # on a machine that was busy
    noisy.forecast.times.fit()
    assert gain(noisy, before, before, 1.5) <= 1.0
    assert gain(policy, before, Rates([], 0)) > 1.1, "without a measurement before, the job's own rates count"


@pytest.mark.parametrize("drafts", [8, "auto"])
def test_text_that_is_never_right_does_not_hide_what_masks_would_gain(drafts: int | str) -> None:
    policy = LookaheadPolicy(causal(drafts=drafts), masks=False)
    ends = np.zeros((4, policy.forecast.most + 1))
    ends[:, 0] = 1
    for _ in range(300):
        policy.outcomes.expect(ends, np.ones(4, np.int64), np.full(4, policy.forecast.most))
        assert len(policy.outcomes.bare.waiting) <= 64
    assert gain(policy, Rates([0.75] * policy.forecast.most, 1000.0)) > 3
