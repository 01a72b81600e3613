"""Scoring of one's own: ``task=batch task.input=examples/prompts.jsonl task.score=examples/score.py:answer``."""

from __future__ import annotations

import re
from typing import Any


def answer(text: str, fields: dict[str, Any]) -> tuple[bool, str | None]:
    """Whether the number behind ``####`` is the line's reference, and what that number is.

    Args:
        text: what the model wrote.
        fields: what the input line says besides the prompt.
    """
    found = re.search(r"#### (-?\d+)", text)
    number = found.group(1) if found else None
    return number == fields["reference"], number
