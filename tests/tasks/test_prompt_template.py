"""Prompts made of columns."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest

from lopa_dist.tasks.prompt_template import fill, names_in, template_of


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("ä", "ä"), (3, "3"), (0.1, "0.1"), (True, "true"), (date(2026, 1, 31), "2026-01-31"), (b"x", "eA=="),
        ([1, "ä", None], '[1, "ä", null]'), ({"a": False}, '{"a": false}'),
    ],
)  # fmt: skip
def test_a_value_is_in_the_prompt_as_json_has_it(value: Any, text: str) -> None:
    template = template_of("{{Is}} {a b.c} so?")
    assert names_in(template) == ["a b.c"]
    assert fill(template, {"a b.c": value}) == f"{{Is}} {text} so?"
