"""What all benchmarks share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lopa_dist.tasks.benchmark import named_apart
from lopa_dist.tasks.task import Item


@given(st.lists(st.sampled_from(["a", "a#2", "a#3", "b", "b#2", "a#2#2"]), max_size=12))
def test_items_have_names_of_their_own(names: list[str]) -> None:
    found = [item.custom_id for item in named_apart(Item(name) for name in names)]
    assert len({*found}) == len(names)
    assert all(one == name or one.startswith(f"{name}#") for one, name in zip(found, names, strict=True))
    assert all(found[names.index(name)] == name for name in names if "#" not in name)
