"""The memory that a rank may still take on a CPU."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from lopa_dist.parallel import node_memory
from lopa_dist.parallel.node_memory import (
    allotted_memory,
    available_memory,
    memory_left,
    resident_memory,
)


def test_memory_is_counted_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = resident_memory()
    assert 16 << 20 < now < 1 << 42
    assert 1 << 20 < available_memory() < 1 << 50
    monkeypatch.setattr(Path, "exists", lambda file: False)  # as on macOS
    assert 0.5 * now < resident_memory() < 1 << 42
    assert 1 << 20 < available_memory() < 1 << 50


@pytest.mark.parametrize(
    ("given", "allotted"),
    [
        ({}, math.inf),
        ({"SLURM_MEM_PER_NODE": "3000"}, 3000 << 20),
        ({"SLURM_MEM_PER_CPU": "1000", "SLURM_CPUS_ON_NODE": "3"}, 3000 << 20),
        ({"SLURM_MEM_PER_NODE": "0"}, math.inf),  # as --mem=0 asks for: all of the node's
    ],
)
def test_slurm_says_how_much_a_job_may_use(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], allotted: float
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert allotted_memory() == allotted


def test_ranks_share_what_is_free_and_what_is_left_of_what_slurm_allots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_memory, "available_memory", lambda: 40 << 30)
    monkeypatch.setattr(node_memory, "resident_memory", lambda: 1 << 30)
    assert memory_left(4) == 10 << 30
    monkeypatch.setenv("SLURM_MEM_PER_NODE", str(16 << 10))
    assert memory_left(4) == 3 << 30  # of 4 GiB each has taken one
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "3000")
    assert memory_left(4) == 0


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not say what a process has now")
def test_memory_that_was_given_back_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of learning takes much for a moment."""
    monkeypatch.setattr(node_memory, "available_memory", lambda: 1 << 50)
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "100000")
    before = memory_left(1)
    taken = torch.ones(512 << 20, dtype=torch.uint8)  # much more than what other tests left may give back or take
    during = memory_left(1)
    assert during < before - (256 << 20)
    del taken
    assert memory_left(1) > during + (256 << 20)
