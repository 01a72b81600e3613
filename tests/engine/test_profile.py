"""What a profile says of rows and branches, and that measuring one reaches every kind of runner."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lopa_dist.engine import profile
from lopa_dist.engine.buckets import ladder
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.profile import MOST_BRANCHES, Profile, measure, usual_window
from lopa_dist.engine.runner import Prepared, Runner
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Solo
from tests.engine import test_loop

BASE = replace(test_loop.BASE, boundary="stale")  # windows of eight rows

ALWAYS, NEVER = EngineConfig(graphs="always"), EngineConfig(graphs="never")


def knee(at: int, floor_s: float = 0.004) -> Profile:
    """A device on which a step costs the same up to `at` rows, and from there on in proportion."""
    return Profile({rows: floor_s * max(1.0, rows / at) for rows in ladder(2048)}, 32)


def test_below_the_knee_branches_are_free_and_above_it_they_cost() -> None:
    found = knee(256)
    assert found.free_branches(sequences=1, ranks=1) == 7  # 8 windows of 32 rows
    assert found.free_branches(sequences=2, ranks=1) == 3
    assert found.free_branches(sequences=8, ranks=1) == 0
    assert found.free_branches(sequences=100, ranks=1) == 0
    assert found.free_branches(sequences=2, ranks=2) == 7  # branches are shared out over ranks
    assert knee(2048).free_branches(sequences=1, ranks=1) == MOST_BRANCHES


def test_one_block_at_a_time_where_more_cost_more_than_they_bring() -> None:
    """Blocks of 32 rows: 48 a sequence, or 120 with many blocks, which bring 1.7 times the tokens."""
    assert knee(256).one_block_from(32) == 4  # 192 rows take 4 ms, 480 take 7.5; with three, 360 take 5.6
    assert knee(256).one_block_from(16) == 8
    assert knee(120).one_block_from(4 * 32) == 1  # of four branches
    assert Profile({32: 1.0, 64: 1.0}, 32).one_block_from(32) == 1  # beyond what was measured in proportion
    assert Profile(dict.fromkeys((1, 10**6), 1.0), 32).one_block_from(32) is None


def test_steps_are_best_filled_up_to_where_a_row_costs_least() -> None:
    assert knee(256).best_rows() == 256
    waves = Profile({128: 1.0, 256: 1.1, 384: 2.1, 512: 2.2}, 32)  # 384 rows begin a second wave
    assert waves.best_rows() == 256


@given(st.integers(1, 10_000))
def test_time_between_and_beyond_what_was_measured(rows: int) -> None:
    assert knee(256).at(rows) == pytest.approx(0.004 * max(1.0, rows / 256))


@pytest.mark.parametrize(("attention", "graphs"), [("torch", "never"), ("meta", "never"), ("meta", "always")])
def test_measuring_times_rising_sizes(small_model: Transformer, attention: str, graphs: str) -> None:
    settings = EngineConfig(attention=attention, graphs=graphs)
    found = measure(small_model, BASE, settings, most_rows=96, budget_s=60)
    assert list(found.seconds) == [8, 32, 64, 96]
    assert all(seconds > 0 for seconds in found.seconds.values())
    few = measure(small_model, BASE, settings, most_rows=96, budget_s=0)
    assert list(few.seconds) == [8]


@pytest.mark.parametrize(
    ("rules", "shift", "rows"),
    [
        ({}, True, 8),
        ({"boundary": "fresh"}, True, 9),
        ({"boundary": "fresh"}, False, 8),
        ({"boundary": "fresh", "window_attention": "block_causal"}, True, 8),
        ({"boundary": "fresh", "verify": "agreement", "drafts": 4}, True, 9 + 2 * 3),
        ({"max_active_blocks": 1}, True, 4),
    ],
    ids=str,
)
def test_a_branch_has_the_rows_that_it_has_in_a_step(rules: dict[str, Any], shift: bool, rows: int) -> None:
    assert usual_window(replace(BASE, **rules), shift) == rows


@pytest.mark.parametrize("drafts", [0, 3])
def test_those_are_the_rows_of_steps(small_model: Transformer, drafts: int) -> None:
    """The most of a step whose sequence has two active blocks and nothing to commit."""
    rules = {"verify": "agreement", "drafts": drafts} if drafts else {}
    config = replace(test_loop.BASE, max_active_blocks=2, tau_conf=0.99, tau_add=0.0, **rules)
    found = set()

    def observe(engine: Engine) -> None:
        batch = engine.lockstep.prepared.batch
        if not batch.prefill and int(batch.stop[0]) - max(int(batch.begin[0]), 0) <= 9:
            found.update(batch.rows.tolist())

    requests = test_loop.random_requests(1, 12, config.max_new_tokens)
    list(Engine(small_model, config, Solo(), EngineConfig(1), observe).generate(requests))
    usual = usual_window(config, shift=True)  # the row before the window is not always among them
    assert usual - 1 <= max(found) <= usual


def test_kernels_are_compiled_before_the_budget_begins(
    small_model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long that takes: each size has run once before the first is timed."""
    clock, ran = [0.0], []
    forward = Runner.forward

    def slow_at_first(runner: Runner, prepared: Prepared) -> torch.Tensor:
        size = len(prepared.batch.tokens)
        clock[0] += 0.001 if size in ran else 100.0
        ran.append(size)
        return forward(runner, prepared)

    monkeypatch.setattr(Runner, "forward", slow_at_first)
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    monkeypatch.setattr(profile, "compiles", lambda device: True)
    found = measure(small_model, BASE, NEVER, most_rows=96, budget_s=20)
    assert list(found.seconds) == [8, 32, 64, 96]
    assert max(found.seconds.values()) < 1
    assert ran[:4] == [8, 32, 64, 96]
