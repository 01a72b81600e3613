"""Every request is handed out once, tries as often as they are asked for, and suspects alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from lopa_dist.engine.request import Request
from lopa_dist.jobs.run.request_source import RequestSource


@given(
    total=st.integers(0, 12), suspects=st.integers(0, 4), mine=st.integers(1, 3),
    asked=st.lists(st.integers(0, 5), min_size=40, max_size=40), tries=st.integers(0, 3), seed=st.integers(0, 9),
)  # fmt: skip
def test_what_is_handed_out(total: int, suspects: int, mine: int, asked: list[int], tries: int, seed: int) -> None:
    """Two replicas share a queue: one takes every `mine`-th number, so what is seen here is its part, in order."""
    suspects = min(suspects, total)
    requests = [Request(index, [1], 4, index) for index in range(total)]
    numbers = iter(range(0, total, mine))
    source = RequestSource(requests, lambda most: list(islice(numbers, most)), suspects)
    limits = iter(asked * 20)
    rounds: list[list[Request]] = []
    left = tries
    while True:
        seen: list[Request] = []
        while True:
            most = max(1, next(limits))
            some = source(most)
            assert len(some) <= most
            seen += some
            if some and left and (seed + len(seen)) % 2:
                left -= 1
                source.again.append(replace(some[-1], key=1000 + left))
            if not some:
                break
        rounds.append(seen)
        if not source.again and not source.next_suspect():
            break
    own = list(range(0, total, mine))
    fresh = [[request.index for request in seen if request.key < 1000] for seen in rounds]
    assert fresh[0] == [number for number in own if number < total - suspects]
    assert [number for one in fresh[1:] for number in one] == [number for number in own if number >= total - suspects]
    assert all(len(one) <= 1 for one in fresh[1:])  # a suspect runs with no other request but tries of its own
    assert sum(request.key >= 1000 for seen in rounds for request in seen) == tries - left
