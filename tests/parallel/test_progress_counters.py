"""Rank 0 shows what all replicas have finished."""

from __future__ import annotations

import pytest
from torch._C._distributed_c10d import HashStore

from lopa_dist.parallel import counters
from lopa_dist.parallel.counters import NAMES, ProgressCounters


def test_a_single_replica_counts_by_itself() -> None:
    counters = ProgressCounters(HashStore(), 1, 0)
    counters.add(done=1, tokens=7)
    assert counters.add(done=2) == dict.fromkeys(NAMES, 0) | {"done": 3, "tokens": 7}


def test_replicas_add_up_on_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "INTERVAL_S", 0.0)
    store = HashStore()
    first, second = ProgressCounters(store, 2, 0), ProgressCounters(store, 2, 1)
    first.add(done=1)
    second.add(done=1, tokens=5)
    monkeypatch.setattr(counters, "INTERVAL_S", float("inf"))
    second.add(tokens=2)  # too early to be written
    assert first.add()["tokens"] == 5
    second.add()
    assert first.add() == dict.fromkeys(NAMES, 0) | {"done": 2, "tokens": 7}
