"""Names of requests and of their several answers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lopa_dist.tasks.names import line_name, sample_name, without_sample


@given(st.text(), st.integers(0, 99))
def test_a_sample_s_name_leads_back_to_its_request(name: str, sample: int) -> None:
    assert without_sample(sample_name(name, sample), sample) == name


def test_lines_are_counted_from_one() -> None:
    assert [line_name(1), sample_name(line_name(1), 0)] == ["line-1", "line-1#0"]
