"""Any text can be written, and one that can be already is not changed."""

from __future__ import annotations

import json
import unicodedata
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lopa_dist.encodable import encodable, json_line, visible

ANY = st.text(st.characters(codec=None, exclude_categories=()))


@given(ANY)
def test_any_text_is_made_encodable(text: str) -> None:
    written = encodable(text)
    assert written.encode().decode() == written
    try:
        text.encode()
    except UnicodeEncodeError:
        assert "\ufffd" in written or any(ord(c) > 0xFFFF for c in written)
    else:
        assert written == text


@given(st.recursive(st.none() | st.integers() | ANY, lambda v: st.lists(v) | st.dictionaries(ANY, v)))
def test_any_value_is_one_line_of_json(value: Any) -> None:
    line = json_line(value)
    assert line.encode().count(b"\n") == 1
    json.loads(line)


def test_halves() -> None:
    assert encodable("a\ud83d") == "a\ufffd"
    assert encodable("\ud83d\udc4d") == "👍"
    assert json_line({"reason": "\udcff"}) == '{"reason": "\ufffd"}\n'


@given(ANY)
def test_what_is_visible_commands_no_terminal(text: str) -> None:
    shown = visible(text)
    assert not any(unicodedata.category(c) == "Cc" and c not in "\n\t" for c in shown)
    assert shown == text or any(unicodedata.category(c) == "Cc" for c in text)
    assert visible("\x1b[31mred\x1b[0m \x9b2J") == r"\x1b[31mred\x1b[0m \x9b2J"
