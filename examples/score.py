"""Scoring of your own: ``task=batch task.input=examples/prompts.jsonl task.score=examples/score.py:answer``."""

from __future__ import annotations

import re
from typing import Any


def answer(text: str, fields: dict[str, Any]) -> tuple[bool, str | None]:
    """Return whether the number after ``####`` is the reference, and the number itself.

    Args:
        text: what the model wrote.
        fields: the fields of the input line other than the prompt.
    """
    found = re.search(r"#### (-?\d+)", text)
    number = found.group(1) if found else None
    return number == fields["reference"], number
