"""What counts as JSON of a format, and what a line may ask for."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("jsonschema", reason="needs jsonschema: pip install 'lopa_dist[json]'")

from lopa_dist.tasks.response_format import ResponseFormat

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v)
)


def of(schema: Any) -> ResponseFormat:
    found = ResponseFormat.of({"type": "json_schema", "json_schema": {"name": "n", "schema": schema}})
    assert found is not None
    return found


@given(ANYTHING)
def test_an_object_is_json_and_nothing_else(value: Any) -> None:
    wanted = ResponseFormat.of({"type": "json_object"})
    assert wanted is not None
    assert (wanted.failure(json.dumps(value)) == "") == isinstance(value, dict)
    assert wanted.failure(f" \n{json.dumps({'a': value})}\n") == ""
    assert wanted.failure(json.dumps({"a": value})[:-1]).startswith("not JSON")


@given(ANYTHING, st.integers(0, 5))
def test_a_schema_decides(value: Any, least: int) -> None:
    wanted = of({"type": "array", "minItems": least, "items": {"type": ["integer", "string"]}})
    right = (
        isinstance(value, list)
        and len(value) >= least
        and all(isinstance(one, int | str) and not isinstance(one, bool) for one in value)
    )
    assert (wanted.failure(json.dumps(value)) == "") == right


def test_texts_that_are_no_json() -> None:
    wanted = ResponseFormat()
    assert "not JSON" in wanted.failure('{"a": NaN}')
    assert "not JSON" in wanted.failure('```json\n{"a": 1}\n```')
    assert "not JSON" in wanted.failure("[" * 100_000)
    assert wanted.failure("[1]") == "JSON, but list instead of an object"
    assert "$.a" in of({"properties": {"a": {"type": "integer"}}}).failure('{"a": "1"}')


def test_a_schema_reaches_nothing_outside() -> None:
    assert "cannot be applied" in of({"$ref": "http://127.0.0.1:1/schema.json"}).failure("{}")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"type": "xml"}, "must be"),
        ({"type": []}, "must be"),
        ({}, "must be"),
        ("json_object", "must be"),
        ({"type": "json_schema"}, "a json_schema needs"),
        ({"type": "json_schema", "json_schema": {"schema": {"type": 5}}}, "the json_schema is not a valid JSON Schema"),
    ],
    ids=str,
)
def test_formats_that_are_none(value: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ResponseFormat.of(value)
    assert ResponseFormat.of({"type": "text"}) is None


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "maximum": 9},
        {"properties": {"a": {}}},
        {"$schema": "https://json-schema.org/draft/2020-12/schema"},
        {"enum": ["positive", "negative"]},
        {"type": ["string", "null"]},
        {"anyOf": [{"type": "integer"}, {"const": "unknown"}]},
    ],
)
def test_a_schema_alone_is_a_format(schema: dict[str, Any]) -> None:
    assert ResponseFormat.of(schema) == ResponseFormat.of({"type": "json_schema", "json_schema": {"schema": schema}})
