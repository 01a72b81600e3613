"""How long steps take is told by those measured."""

from __future__ import annotations

from lopa_dist.engine.step_times import StepTimes


def test_times_lie_between_those_measured() -> None:
    times = StepTimes()
    assert times.expected(10) == times.expected(1000)
    times.measured(100, 2.0)
    times.measured(200, 3.0)
    times.fit()
    assert times.expected(150) == 2.5
    assert 1.0 <= times.expected(50) < 2.0  # no row takes longer than the nearest one measured
    assert 3.0 < times.expected(400) <= 6.0
