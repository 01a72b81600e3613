"""Text that can be written: no encoding has half of a surrogate pair, and Python's strings may hold one.

A model's program puts one into its error message, a file name that is not UTF-8 consists of them. Whatever a job writes
passes through here, so that no text of one request takes the others' results with it.
"""

from __future__ import annotations

import json
from typing import Any


def encodable(text: str) -> str:
    """The text, with U+FFFD for each half of a pair that stands alone; halves that belong together become one."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def json_line(value: Any) -> str:
    """A line of a JSON Lines file."""
    return encodable(json.dumps(value, ensure_ascii=False)) + "\n"
