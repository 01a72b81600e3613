"""The cluster simulator: jobs worked out by hand, what holds for all of them, and what it takes from the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.answers import load
from benchmarks.cluster import gpus, host_seconds
from benchmarks.cluster_jobs import Measured, Watch, by_rows, config_of, problems_of
from benchmarks.cluster_simulator import ORDERS, Cluster, Gains, Outcome, Requests, simulate
from lopa_dist.engine.config import EngineConfig


def requests(answers: Sequence[int], prompt: int = 10) -> Requests:
    return Requests(np.full(len(answers), prompt), np.array(answers))


def cluster(
    replicas: int, slots: int, order: str = "input", gain: int = 2, seconds: float = 1.0, a_row: float = 0.0
) -> Cluster:
    """Always so many tokens per step, as long as so many are missing; a sequence has four rows."""
    most = np.minimum(np.arange(1, 101), gain)[:, None]
    gains = Gains(np.stack([most, most]), np.full((2, 100), 4.0))
    return Cluster(replicas, gains, lambda rows, sequences: seconds + a_row * rows, slots, order)


def job(answers: Sequence[int], replicas: int, slots: int, order: str = "input") -> Outcome:
    return simulate(requests(answers), cluster(replicas, slots, order))


def test_one_replica_by_hand() -> None:
    found = job([6, 2, 5, 1], 1, 2)
    # 0 and 1 run; 1 ends after a step, 2 takes its place and runs for steps 2 to 4; 0 ends with step 3, and 3 runs in 4
    assert found.finished.tolist() == [3, 1, 4, 4]
    assert found.forwards.tolist() == [3, 1, 3, 1]
    assert (found.steps.tolist(), found.busy.tolist(), found.seconds) == ([4], [4.0], 4.0)


def test_a_step_takes_as_long_as_its_rows() -> None:
    found = simulate(requests([4, 2], prompt=10), cluster(1, 2, a_row=0.5))
    first, second = 1 + 0.5 * (2 * 4 + 2 * 10), 1 + 0.5 * 4  # prompts run in the first step only
    assert found.finished.tolist() == [first + second, first]


def test_replicas_share_a_queue() -> None:
    found = job([8, 2, 2, 2, 2], 2, 1)
    assert found.finished.tolist() == [4, 1, 2, 3, 4]
    assert found.steps.tolist() == [4, 4]


def test_longest_first_by_hand() -> None:
    assert job([2, 2, 2, 8], 2, 1).seconds == 5.0
    assert job([2, 2, 2, 8], 2, 1, "longest").seconds == 4.0


def test_dealt_out_long_answers_are_on_different_replicas() -> None:
    asked = requests([2, 8, 2, 8], prompt=0)
    a_second_each = partial(cluster, 2, 2, seconds=0.0, a_row=0.25)  # for each sequence of a step
    longest, dealt = (simulate(asked, a_second_each(order)) for order in ("longest", "dealt"))
    assert longest.finished.tolist() == [2, 8, 2, 8]  # one replica has both long ones
    assert dealt.finished.tolist() == [2, 5, 2, 5]


def test_no_replica_has_more_in_flight_than_its_share() -> None:
    assert job([2, 2, 2, 2], 2, 64).steps.tolist() == [1, 1]


def test_answers_longer_than_any_measured_are_gained_piece_by_piece() -> None:
    gains = Gains(np.array([[[1], [1], [1]], [[1], [2], [3]]]), np.ones((2, 3)))  # a first step gains one token
    assert simulate(requests([7]), Cluster(1, gains, lambda rows, sequences: 1.0, 1)).forwards.tolist() == [
        5
    ]  # 1; 1 and 2; 1 and 2


answers = st.lists(st.integers(1, 250), min_size=1, max_size=40)


@given(answers, st.integers(1, 6), st.integers(1, 5), st.sampled_from(ORDERS), st.integers(0, 9))
def test_every_request_is_finished_once(lengths: list[int], replicas: int, slots: int, order: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    tokens = np.minimum(random.integers(0, 9, (2, 100, 8)), np.arange(1, 101)[:, None])
    tokens[:, :, 0] = 1  # some case gains something
    gains = Gains(tokens, random.random((2, 100)) * 50)
    single = Cluster(1, gains, lambda rows, sequences: 0.1 + rows / 1000, 1)
    found = simulate(requests(lengths), replace(single, replicas=replicas, max_sequences=slots, order=order), seed)
    alone = simulate(requests(lengths), single, seed)
    assert (found.finished > 0).all()
    assert found.forwards.tolist() == alone.forwards.tolist(), "the work is the same in every order"
    assert found.busy.sum() <= replicas * found.seconds + 1e-9
    assert found.seconds <= alone.seconds + 1e-9


@given(answers, st.integers(1, 6), st.integers(1, 5))
def test_more_replicas_are_never_slower_where_steps_take_equally_long(
    lengths: list[int], replicas: int, slots: int
) -> None:
    few, more = (simulate(requests(lengths), cluster(n, slots, gain=3)) for n in (replicas, replicas + 1))
    assert more.seconds <= few.seconds + 1e-9


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(ValueError, match="shortest"):
        job([1], 1, 1, "shortest")


def test_seconds_by_rows_lie_on_lines_between_measured_ones() -> None:
    at = by_rows({10: 1.0, 20: 3.0})
    assert [at(5), at(15), at(20), at(40)] == [1.0, 2.0, 3.0, 6.0]


def test_rows_of_the_busiest_branch_rank() -> None:
    table = [[[1], [2]], [[1], [2]]]
    measured = Measured(table, [[10.0] * 2] * 2, [[1.0, 2.5]] * 2, 3.0, 4, 5.0, 12.0)  # 1 or, on the mean, 2.5 of 4
    assert measured.gains(1).rows[0].tolist() == [10, 25]
    assert measured.gains(2).rows[0].tolist() == [10, 20]
    assert measured.gains(4).rows[0].tolist() == [10, 10]


def test_watching_an_engine_finds_every_step_and_every_token() -> None:
    builder, watch = load(), Watch()
    engine = builder.engine(config_of("k=0 m=4"), EngineConfig(2), on_step=watch)
    done = list(engine.generate(problems_of(builder, 4)))
    later, missing, gained, rows, branches = np.array(watch.steps, int).T
    assert len(later) == sum(g.forwards for g in done)
    assert (later == 0).sum() == 4
    assert gained.sum() == missing[later == 0].sum() == sum(len(g.tokens) + (g.finish_reason == "stop") for g in done)
    assert (rows * branches).sum() == engine.statistics.rows


def test_a_projected_step_by_hand() -> None:
    table = [[[1]], [[1]]]
    measured = Measured(table, [[64.0]] * 2, [[2.0]] * 2, 20.0, 2, 4.0, 12.0)
    alone = gpus(measured, 1, 1, 1).seconds(64, 1)
    assert alone == pytest.approx(14.14e9 / 4.8e12 + host_seconds()(1))
    records, commits = 12 * 20 + 4, 4 / 16  # bytes of a rank; blocks that the sequence completes in a step
    block = 16 * 57_344  # bytes of one
    sent = 15e-6 + records / 300e9 + commits * (15e-6 + block / 300e9)
    assert gpus(measured, 1, 2, 1).seconds(64, 1) == pytest.approx(alone + sent)
