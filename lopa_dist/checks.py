"""Checks of option values; what they raise names the key and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field, fields
from typing import Any, TypeVar

from lopa_dist.removed import instead

T = TypeVar("T")


class UserError(ValueError):
    """A mistake that a person can mend: shown as one line, without a traceback."""


def option(default: T, meaning: str, choices: Sequence[Any] = ()) -> T:
    """Return a dataclass field that is a setting: its default, its meaning in one line, its choices if it has few.

    `lopa-dist explain` and docs/configuration.md show all of that; `check_choices` holds values to their choices.
    """
    return field(default=default, metadata={"meaning": meaning, "choices": tuple(choices)})


def choices_of(section: Any) -> dict[str, tuple[Any, ...]]:
    """Return the choices of a section's settings, by name, of those that have some."""
    return {f.name: f.metadata["choices"] for f in fields(section) if f.metadata.get("choices")}


def check_choices(name: str, section: Any) -> None:
    """Raise a ValueError unless the settings of the section `name` are among their choices."""
    for key, choices in choices_of(section).items():
        require(f"{name}.{key}", getattr(section, key), choices)


def require(key: str, value: Any, choices: Sequence[Any]) -> None:
    """Raise a ValueError unless `value` is one of `choices`."""
    if value not in choices:
        gone = instead(key, value)
        more = f"; this choice is gone: {gone}" if gone else ""
        raise ValueError(f"{key}={value!r}: must be one of {', '.join(map(written, choices))}{more}")


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
