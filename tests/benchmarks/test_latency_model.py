"""The benchmark's latency model, worked out by hand."""

from __future__ import annotations

from benchmarks.latency_model import Link, Load, Model, exchange


def test_a_forward_is_no_faster_than_the_weights_can_be_read() -> None:
    model = Model(weight_bytes=10.0, parameters=1.0, bandwidth=1.0, rate=1.0)
    assert model.forward(32) == 64.0
    assert model.forward(4) == 10.0


def test_an_exchange_by_hand() -> None:
    link, load = Link(alpha=100.0, beta=1.0), Load(branches=8, sequences=1, masked=2, commits=1, block=3)
    assert exchange(5.0, link, load, 1) == 0.0
    assert exchange(5.0, link, load, 4) == 3 * (100 + 12 * 2 * 2 + 4) + 2 * (100 + 3 * 5)


def test_many_commits_share_their_owners_broadcasts() -> None:
    link, load = Link(alpha=1.0, beta=0.5), Load(branches=8, sequences=16, masked=0, commits=0.5, block=2)
    gathered = 1 + 0.5 * 4
    assert exchange(1.0, link, load, 2) == gathered + 2 * (1 + 0.5 * 8)
