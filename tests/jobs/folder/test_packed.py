"""Ids and figures of many requests in columns."""

from __future__ import annotations

import math

import pytest

from lopa_dist.jobs.folder.packed import LENGTH, Columns, RequestIds


def ids_of(*names: str | None) -> RequestIds:
    ids = RequestIds()
    for name in names:
        ids.append(name)
    return ids


def test_ids_are_found_where_they_are() -> None:
    names = ["b" * LENGTH, None, "a", "c" * 20, None]
    ids = ids_of(*names)
    assert [ids[n] for n in range(len(ids))] == names
    assert ids.find(["a", "c" * 20, "b" * LENGTH]).tolist() == [2, 3, 0]
    assert ids.find(["x", "", "b" * (LENGTH + 1), "ä"]).tolist() == [-1] * 4
    assert ids.find([]).tolist() == []
    assert RequestIds().find(["a"]).tolist() == [-1]
    assert ids.repeated() is None
    assert RequestIds().repeated() is None
    assert ids_of("b", "a", None, "b", None).repeated() == 3
    with pytest.raises(IndexError):
        ids[5]


def test_what_a_row_has_not_is_nan() -> None:
    columns = Columns()
    rows = [{"a": 1}, {"a": 2.5, "also": {"x": True}}, {"b": None, "also": {}}, {"a": None, "also": {"x": False}}]
    for row in rows:
        columns.append(row)
    assert len(columns) == 4
    nan = math.nan
    assert columns["a"].tolist() == pytest.approx([1, 2.5, nan, nan], nan_ok=True)
    assert columns["also.x"].tolist() == pytest.approx([nan, 1, nan, 0], nan_ok=True)
    assert columns.known("also.x").tolist() == [1, 0]
    assert set(columns.columns) == {"a", "also.x", "b"}
    assert columns.known("never").tolist() == []
