"""What draws without a generator, as new layers do, draws the same in each run, whichever tests came before."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="module")
def layer() -> torch.nn.Linear:
    return torch.nn.Linear(1, 1)


def drawn(seed: int = 0) -> float:
    torch.manual_seed(seed)
    return float(torch.nn.Linear(1, 1).weight)


def test_a_fixture_draws_the_same(layer: torch.nn.Linear) -> None:
    assert float(layer.weight) == drawn()


@pytest.mark.parametrize("run", [1, 2])
def test_a_test_draws_the_same(run: int) -> None:
    found = float(torch.nn.Linear(1, 1).weight)
    assert found == drawn() != drawn(run)
