"""What an attempt at a job has to know of the earlier ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lopa_dist.jobs.attempt import pack_flags, unpack_flags


@given(st.lists(st.integers(0, 1)))
def test_flags_are_the_same_on_all_ranks(flags: list[int]) -> None:
    assert unpack_flags(pack_flags(bytearray(flags))) == bytearray(flags)


def test_flags_of_a_large_job_fit_into_the_store() -> None:
    assert len(pack_flags(bytearray([1] * 900_000 + [0] * 100_000))) < 10_000
