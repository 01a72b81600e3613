"""Text that can be written: Python's strings may hold half of a surrogate pair, which no encoding can write.

Programs that a model writes may put one into an error message, and file names that are not UTF-8 are read with some.
Whatever a job writes passes through here, so that the text of one request cannot cost the others their results.
"""

from __future__ import annotations

import json
from typing import Any


def encodable(text: str) -> str:
    """Return the text with U+FFFD for each lone half of a pair; two halves that belong together become a character."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def json_line(value: Any) -> str:
    """Return `value` as a line of a JSON Lines file."""
    return encodable(json.dumps(value, ensure_ascii=False)) + "\n"
