"""What is timed is the function, and of its runs those that count."""

from __future__ import annotations

import pytest
import torch

from lopa_dist.engine import clock
from lopa_dist.engine.clock import graphed, median_ms


def test_the_median_of_the_runs_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now, spent = [0.0], [9.0, 9.0, 0.003, 0.001, 0.002]  # seconds; compiling and capturing first

    def run() -> None:
        now[0] += spent.pop(0)

    def before() -> None:
        now[0] += 100.0

    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])
    cpu = torch.device("cpu")
    assert median_ms(graphed(run, cpu), cpu, 3, before) == pytest.approx(2.0)
    assert not spent
