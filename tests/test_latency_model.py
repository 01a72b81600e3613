"""The benchmark's latency model: fitted as made, and a step worked out by hand."""

from __future__ import annotations

import pytest

from benchmarks.latency_model import Link, Load, Model, fit, step


def test_a_fit_finds_what_the_times_were_made_of() -> None:
    made = Link(alpha=2e-4, beta=1e-9)
    found = fit({size: made.alpha + made.beta * size for size in (64, 4096, 65_536, 1_048_576)})
    assert (found.alpha, found.beta) == pytest.approx((made.alpha, made.beta), rel=1e-6)
    assert fit({64: 1e-4, 1_000_000: 1e-5}).beta == 0.0


def test_a_step_by_hand() -> None:
    model = Model(weight_bytes=10.0, parameters=1.0, kv_bytes=5.0, bandwidth=1.0, rate=1.0)
    link, load = Link(alpha=100.0, beta=1.0), Load(branches=8, sequences=1, window=4, masked=2, commits=1, block=3)
    assert step(model, link, load, 1) == {"forward": 64.0, "all_gather": 0.0, "commit": 0.0, "total": 64.0}
    four = step(model, link, load, 4)
    assert four["forward"] == 2 * 4 * 2
    assert four["all_gather"] == 3 * (100 + 12 * 2 * 2 + 4)
    assert four["commit"] == 2 * (100 + 3 * 5)
    assert step(model, link, load, 64)["forward"] == 10.0, "no faster than the weights can be read"


def test_many_commits_share_their_owners_broadcasts() -> None:
    model, load = Model(kv_bytes=1.0), Load(branches=8, sequences=16, commits=0.5, block=2)
    parts = step(model, Link(alpha=1.0, beta=0.5), load, 2)
    assert parts["commit"] == 2 * (1 + 0.5 * 8)
