"""Checks of option values; what they raise names the key and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import field, fields
from difflib import get_close_matches
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class UserError(ValueError):
    """A mistake that a person can mend: shown as one line, without a traceback."""


def in_a_line(error: Exception) -> str:
    """An error of another package in one line of at most 300 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def did_you_mean(word: str, known: Sequence[str], number: int = 1) -> str:
    """Return ``; did you mean X?`` with the nearest of the known words, or a full stop."""
    near = get_close_matches(word, known, number)
    return f"; did you mean {', '.join(near)}?" if near else "."


class Reader(NamedTuple):
    """What reads a setting: without it, the setting would have no effect."""

    reads: Callable[[Any], bool]  # whether it does, with these settings of a section
    who: str


def option(
    default: T, meaning: str, choices: Sequence[Any] = (), least: int | None = None, reader: Reader | None = None
) -> T:
    """Return a dataclass field that is a setting: its default, its meaning in one line, its choices if it has few.

    `lopa-dist explain` and docs/configuration.md show these; `check_options` holds values to them, and integers
    to be `least` or more; `check_read` refuses one that its `reader` does not read.
    """
    metadata = {"meaning": meaning, "choices": tuple(choices), "least": least, "reader": reader}
    return field(default=default, metadata=metadata)


def check_options(name: str, section: Any) -> None:
    """Raise a ValueError unless the settings of the section `name` are what their `option` allows."""
    for entry in fields(section):
        key, value, kind = f"{name}.{entry.name}", getattr(section, entry.name), str(entry.type)
        if choices := entry.metadata.get("choices"):
            require(key, value, choices)
        least = entry.metadata.get("least")
        if least is not None and not (value is None and "None" in kind):
            require_count(key, value, least, auto="str" in kind)


def check_read(name: str, asked: Any, section: Any, deciding: Any = None, typed: Collection[str] | None = None) -> None:
    """Raise a ValueError for a setting that was given a value and that nothing reads.

    Args:
        name: of the section.
        asked: the settings as they were given, perhaps ``auto``.
        section: the same without any ``auto``.
        deciding: the section that its readers ask (`Reader.reads`); None: itself.
        typed: keys that a person typed; others come from presets. None: unknown, and a default is let through.
    """
    for entry in fields(section):
        key, value = f"{name}.{entry.name}", getattr(asked, entry.name)
        reader, given = entry.metadata.get("reader"), value != entry.default or key in (typed or ())
        if reader is None or value == "auto" or not given or reader.reads(deciding or section):
            continue
        remedy = f"leave it out, or at {written(entry.default)}"
        if typed is not None:
            remedy = "leave it out" if key in typed else f"it comes from a preset: choose another {name}=, or none"
        raise ValueError(f"{key}={written(value)}: has no effect here, for only {reader.who} read it; {remedy}")


def require(key: str, value: Any, choices: Sequence[Any]) -> None:
    """Raise a ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{key}={value!r}: must be one of {', '.join(map(written, choices))}")


def written(choice: Any) -> str:
    """A choice as one writes it on the command line."""
    return "null" if choice is None else str(choice).lower() if isinstance(choice, bool) else str(choice)


def require_count(key: str, value: Any, least: int = 1, auto: bool = False) -> None:
    """Raise a ValueError unless `value` is an integer of at least `least` (or ``auto``)."""
    if auto and value == "auto":
        return
    if not isinstance(value, int) or value < least:
        allowed = f"an integer of at least {least}" + (" or 'auto'" if auto else "")
        raise ValueError(f"{key}={value!r}: must be {allowed}")


def require_seconds(key: str, value: float, zero: bool = False) -> None:
    """Raise a ValueError unless `value` is a finite number above 0 (or ``zero``)."""
    if not (math.isfinite(value) and (value > 0 or (zero and value == 0))):
        raise ValueError(f"{key}={value}: must be {'at least' if zero else 'above'} 0 seconds")


def number(value: Any) -> Any:
    """Integers that arrive as text (a field may be an int or 'auto') become integers."""
    return int(value) if isinstance(value, str) and value.lstrip("-").isdigit() else value
