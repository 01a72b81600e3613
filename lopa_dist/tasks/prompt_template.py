"""A prompt with the names of a line's fields in braces: ``Classify: {text}``. A doubled brace stands for a brace."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping
from string import Formatter
from typing import Any

Template = tuple[tuple[str, str | None], ...]
"""Pieces of a prompt: a text, and the name of the field after it (None: no field)."""


def template_of(text: str) -> Template:
    """Return the pieces of a template. A name may be that of any column, with spaces and dots.

    Raises:
        ValueError: a brace is not closed, or there is no field at all.
    """
    pieces: list[tuple[str, str | None]] = []
    try:
        for before, name, more, conversion in Formatter().parse(text):
            if conversion:
                name = f"{name}!{conversion}"
            pieces.append((before, f"{name}:{more}" if more else name))
    except ValueError as error:
        raise ValueError(f"task.prompt={text}: {error}; a brace of the text is written twice: {{{{ or }}}}") from error
    if not any(name for _, name in pieces):
        raise ValueError(f"task.prompt={text}: name a column in braces, as in 'Classify: {{text}}'")
    if any(name == "" for _, name in pieces):
        raise ValueError(
            f"task.prompt={text}: {{}} names no column; a brace of the text is written twice: {{{{ or }}}}"
        )
    return tuple(pieces)


def names_in(template: Template) -> list[str]:
    """Return the fields that a template asks for, each once."""
    return list(dict.fromkeys(name for _, name in template if name is not None))


def fill(template: Template, values: Mapping[str, Any]) -> str:
    """Return the prompt with each field's value in its place: texts as they are, all else as JSON has it."""
    return "".join(before + ("" if name is None else text_of(values[name])) for before, name in template)


def text_of(value: Any) -> str:
    """Return a value as text; lists, objects and truth values become JSON."""
    as_json = isinstance(value, list | dict | bool)
    return json.dumps(value, ensure_ascii=False, default=in_json) if as_json else in_json(value)


def in_json(value: Any) -> str:
    """Return a value as a text where JSON has none of its kind: binary data in base64, dates as Python writes them."""
    return b64encode(value).decode() if isinstance(value, bytes) else str(value)
