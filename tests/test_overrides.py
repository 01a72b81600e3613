"""Settings are shown so that they can be typed again."""

from __future__ import annotations

import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from lopa_dist import cli
from lopa_dist.overrides import in_quotes, quoted


@pytest.mark.parametrize(
    "value",
    [
        "a/b.jsonl",
        "a b(1).jsonl",
        "x=1,y=2/c",
        "multirun/decode.branches=1,seed=2",
        "o'brien/a",
        "a\\",
        "a\\'b c",
        "'",
        "ü/x",
    ],
)
def test_settings_are_shown_as_one_can_type_them(value: str) -> None:
    [typed] = shlex.split(cli.typed("hydra.run.dir", value))
    assert OverridesParser.create().parse_override(typed).value() == value


@given(st.text("ab'\\ \"=,()", min_size=1, max_size=8))
def test_any_text_is_quoted_for_hydra_and_for_a_shell(text: str) -> None:
    [typed] = shlex.split(cli.typed("model.path", text))
    assert OverridesParser.create().parse_override(typed).value() == text
    assert OverridesParser.create().parse_override(f"k={quoted(text)}").value() == text
    assert OverridesParser.create().parse_override(f"k={in_quotes(text)}").value() == text


@pytest.mark.parametrize("text", ["1.50", "1e-4", "1_000", "true", "null", "nan", "0x1f", "\\"])
def test_a_text_that_looks_like_a_number_stays_one_in_quotes(text: str) -> None:
    value = OverridesParser.create().parse_override(f"k={in_quotes(text)}").value()
    assert str(value) == text
