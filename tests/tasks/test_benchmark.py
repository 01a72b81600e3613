"""What all benchmarks share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lopa_dist.tasks.benchmark import named_apart
from lopa_dist.tasks.task import Item


@given(st.lists(st.sampled_from(["a", "a#0", "a#1", "b", "b#0", "a#0#0"]), max_size=12))
def test_items_have_names_of_their_own(names: list[str]) -> None:
    """Repeated ones are samples of one problem, with names as other samples have."""
    found = list(named_apart([(row, Item(name)) for row, name in enumerate(names)]))
    assert len({item.custom_id for item in found}) == len(names)
    for row, (name, item) in enumerate(zip(names, found, strict=True)):
        if names.count(name) == 1:
            assert item == Item(name)
            continue
        assert item.origin
        assert (item.origin.line, item.origin.custom_id) == (row, name)
        assert item.custom_id == f"{name}#{item.origin.sample}"
