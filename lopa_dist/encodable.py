"""Text that can be written: Python's strings may hold half of a surrogate pair, which no encoding can write.

Programs that a model writes may put one into an error message, and file names that are not UTF-8 are read with some.
Whatever a job writes passes through here, so that the text of one request cannot cost the others their results. What a
terminal shows passes through `visible`.
"""

from __future__ import annotations

import json
import unicodedata
from typing import Any


def encodable(text: str) -> str:
    """Return the text with U+FFFD for each lone half of a pair; two halves that belong together become a character."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def visible(text: str) -> str:
    """Return a text with its control characters escaped, so that a terminal does not obey them."""
    if text.isprintable():
        return text
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else f"\\x{ord(c):02x}" for c in text)


def json_line(value: Any) -> str:
    """Return `value` as a line of a JSON Lines file."""
    return encodable(json.dumps(value, ensure_ascii=False)) + "\n"
