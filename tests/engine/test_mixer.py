"""Proposals are weighed by what their voters have earned."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from lopa_dist.engine.mixer import CHANCES, LEANS, SCALE, WIDE, Mixer

VOTERS = 3


def mixer() -> Mixer:
    return Mixer(VOTERS, [0.5, 0.5, 0.5, 0.9], trusted=2)


def test_tables_rise_and_are_symmetric() -> None:
    for table, whole in ((LEANS, 0.0), (CHANCES, 1.0)):
        assert list(table) == sorted(table)
        assert all(abs(low + high - whole) < 1e-4 for low, high in zip(table, table[::-1], strict=True))
    assert len(CHANCES) == 2 * WIDE * SCALE


def test_a_trusted_voter_alone_is_believed() -> None:
    made = mixer()
    decision = made.decide([made.proposal(7, 2, 3)])
    assert decision.token == 7
    assert abs(decision.chance - 0.9) < 0.01
    assert made.decide([]).token == -1


def test_one_that_is_right_outvotes_many_that_are_wrong() -> None:
    made, rng = mixer(), random.Random(0)
    for _ in range(400):
        right, wrong = rng.sample(range(10), 2)
        decision = made.decide([made.proposal(wrong, 0, 0), made.proposal(wrong, 1, 1), made.proposal(right, 2, 2)])
        made.learn(decision, right)
    assert decision.token == right
    assert decision.chance > 0.9


def test_chances_come_true() -> None:
    """Of what is drafted with a chance of about p, a share of about p is right: two voters, right at 90 and 60 %."""
    made, rng = mixer(), random.Random(1)
    sums = {low: [0.0, 0, 0] for low in (0.2, 0.5, 0.8)}
    for number in range(20_000):
        token = rng.randrange(50)
        votes = [token if rng.random() < share else rng.randrange(50) for share in (0.9, 0.6)]
        decision = made.decide([made.proposal(vote, i, i) for i, vote in enumerate(votes)])
        made.learn(decision, token)
        if number > 5_000 and decision.chance >= 0.2:
            low = max(low for low in sums if low <= decision.chance)
            sums[low] = [sums[low][0] + decision.chance, sums[low][1] + (decision.token == token), sums[low][2] + 1]
    for expected, right, count in sums.values():
        assert count < 200 or abs(expected - right) < 0.06 * count


def test_the_weights_go_by_how_many_propose_how_many_tokens() -> None:
    made = Mixer(5, [0.5] * 5, trusted=4)
    sets = [
        made.decide([made.proposal(token, voter, voter) for voter, token in enumerate(tokens)]).weights
        for tokens in (
            [1],
            [1, 1],
            [1, 2],
            [1, 1, 1],
            [1, 2, 1],
            [1, 2, 3],
            [1, 2, 3, 4],
            [1, 2, 3, 4, 5],
            [1, 1, 1, 1],
        )
    ]
    assert sets == [0, 0, 1, 4, 5, 6, 7, 7, 4]


@given(
    proposals=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), max_size=3, unique_by=lambda one: one[1]),
    tokens=st.lists(st.integers(0, 4), max_size=30),
)
def test_a_decision_is_one_of_the_proposals(proposals: list[tuple[int, int]], tokens: list[int]) -> None:
    made = mixer()
    for token in tokens:
        decision = made.decide([made.proposal(one, voter, voter) for one, voter in proposals])
        assert decision.token in {one for one, _ in proposals} or (not proposals and decision.token == -1)
        assert 0 <= decision.chance < 1
        made.learn(decision, token)
    assert all(weight >= 0 for weights in made.weights for weight in weights[:-1])
    made.forget(3)
    assert [weights[2] for weights in made.weights] == [weights[2] for weights in mixer().weights]
