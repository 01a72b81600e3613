"""What a profile says of rows and branches, and that measuring one reaches every kind of runner."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lopa_dist.engine.buckets import ladder
from lopa_dist.engine.profile import MOST_BRANCHES, Profile, measure
from lopa_dist.kernels.products import PRODUCTS
from lopa_dist.models.fused import projections
from lopa_dist.models.transformer import Transformer
from tests.engine.test_loop import BASE


def knee(at: int, floor_s: float = 0.004) -> Profile:
    """A device on which a step costs the same up to `at` rows, and from there on in proportion."""
    return Profile({rows: floor_s * max(1.0, rows / at) for rows in ladder(2048)}, window=32)


def test_below_the_knee_branches_are_free_and_above_it_they_cost() -> None:
    profile = knee(256)
    assert profile.free_branches(sequences=1, ranks=1) == 7  # 8 windows of 32 rows
    assert profile.free_branches(sequences=2, ranks=1) == 3
    assert profile.free_branches(sequences=8, ranks=1) == 0
    assert profile.free_branches(sequences=100, ranks=1) == 0
    assert profile.free_branches(sequences=2, ranks=2) == 7  # branches are shared out over ranks
    assert knee(2048).free_branches(sequences=1, ranks=1) == MOST_BRANCHES


def test_steps_are_best_filled_up_to_where_a_row_costs_least() -> None:
    assert knee(256).best_rows() == 256
    waves = Profile({128: 1.0, 256: 1.1, 384: 2.1, 512: 2.2}, 32)  # 384 rows begin a second wave
    assert waves.best_rows() == 256


@given(st.integers(1, 10_000))
def test_time_between_and_beyond_what_was_measured(rows: int) -> None:
    assert knee(256).at(rows) == pytest.approx(0.004 * max(1.0, rows / 256))


@pytest.mark.parametrize(("attention", "graphs"), [("torch", "never"), ("meta", "never"), ("meta", "always")])
def test_measuring_times_rising_sizes(small_model: Transformer, attention: str, graphs: str) -> None:
    profile = measure(small_model, BASE, attention, graphs, most_rows=96, budget_s=60)
    assert list(profile.seconds) == [8, 32, 64, 96]
    assert all(seconds > 0 for seconds in profile.seconds.values())
    few = measure(small_model, BASE, attention, graphs, most_rows=96, budget_s=0)
    assert list(few.seconds) == [8]


def test_forwards_multiply_as_the_jobs_will(small_model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    rows_of: list[int] = []
    plain = PRODUCTS["vgemm"]
    monkeypatch.setitem(PRODUCTS, "vgemm", lambda x, *rest: (rows_of.append(len(x)), plain(x, *rest))[1])
    products = {(64, *shape): "vgemm" for shape in projections(small_model.config).values()}
    measure(small_model, BASE, "meta", "always", 96, 60, products)
    assert set(rows_of) == {64}
