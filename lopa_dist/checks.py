"""Checks of option values; their errors name the key and what is allowed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import field, fields
from difflib import get_close_matches
from numbers import Integral
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class UserError(ValueError):
    """A mistake that the user can correct: only its message is shown, without a traceback."""


def in_a_line(error: Exception) -> str:
    """Return an error of another package as one line of at most 300 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def did_you_mean(word: str, known: Sequence[str], number: int = 1) -> str:
    """Return ``; did you mean X?`` with up to `number` of the nearest `known` words; a full stop if none is near."""
    near = get_close_matches(word, known, number)
    return f"; did you mean {', '.join(near)}?" if near else "."


class Reader(NamedTuple):
    """The part of the program that reads a setting, which has no effect where this part does not run."""

    reads: Callable[[Any], bool]  # whether it reads the setting, given the settings of a section
    who: str  # in words, for messages


def option(
    default: T, meaning: str, choices: Sequence[Any] = (), least: int | None = None, reader: Reader | None = None
) -> T:
    """Return a dataclass field for a setting with its default, its meaning in one line, and its choices if it has few.

    `lopa-dist explain` and docs/configuration.md show these. `check_options` requires values to be among the choices,
    and integers to be at least `least`. `check_read` refuses a setting that its `reader` does not read.
    """
    metadata = {"meaning": meaning, "choices": tuple(choices), "least": least, "reader": reader}
    return field(default=default, metadata=metadata)


def check_options(name: str, section: Any) -> None:
    """Raise a ValueError unless the settings of the section `name` are what their `option` allows."""
    for entry in fields(section):
        key, value, kind = f"{name}.{entry.name}", getattr(section, entry.name), str(entry.type)
        if choices := entry.metadata.get("choices"):
            require(key, value, choices)
        least, nullable = entry.metadata.get("least"), "None" in kind
        if least is None or (value is None and nullable):
            continue
        if isinstance(value, Integral) and not isinstance(value, int):  # as numpy's are
            setattr(section, entry.name, value := int(value))
        # where null is not the default, it may not suit the task
        require_count(key, value, least, auto="str" in kind, null=nullable and entry.default is None)


def check_read(name: str, asked: Any, section: Any, deciding: Any = None, typed: Collection[str] | None = None) -> None:
    """Raise a ValueError for a setting that was given a value but is not read.

    Args:
        name: of the section.
        asked: the settings as they were given; some may be ``auto``.
        section: the same settings without any ``auto``.
        deciding: the section by which `Reader.reads` decides; None: `section`.
        typed: keys that the user typed; others come from presets. None: unknown; then a default value is accepted.
    """
    for entry in fields(section):
        key, value = f"{name}.{entry.name}", getattr(asked, entry.name)
        reader, given = entry.metadata.get("reader"), value != entry.default or key in (typed or ())
        if reader is None or value == "auto" or not given or reader.reads(deciding or section):
            continue
        remedy = f"leave it out, or at {written(entry.default)}"
        if typed is not None:
            other = " (decode=vanilla, decode=embedded_plain and others)" if name == "decode" else ""
            remedy = "leave it out" if key in typed else f"it comes from a preset: choose another {name}={other}"
        raise ValueError(f"{key}={written(value)}: has no effect here: only {reader.who} read it; {remedy}")


def require(key: str, value: Any, choices: Sequence[Any]) -> None:
    """Raise a ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{key}={value!r}: must be one of {', '.join(map(written, choices))}")


def written(choice: Any) -> str:
    """Return a choice as one writes it on the command line."""
    return "null" if choice is None else str(choice).lower() if isinstance(choice, bool) else str(choice)


def require_count(key: str, value: Any, least: int, auto: bool = False, null: bool = False) -> None:
    """Raise a ValueError unless `value` is an integer of at least `least`; with `auto` or `null`, these are named, too.

    ``auto`` is then accepted. Null is for the caller to accept.
    """
    if auto and value == "auto":
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        allowed = f"an integer of at least {least}" + (" or 'auto'" if auto else "") + (", or null" if null else "")
        raise ValueError(f"{key}={value!r}: must be {allowed}")


def require_seconds(key: str, value: float, zero: bool = False) -> None:
    """Raise a ValueError unless `value` is a finite number above 0, or 0 if `zero` allows it."""
    if not (math.isfinite(value) and (value > 0 or (zero and value == 0))):
        raise ValueError(f"{key}={value}: must be {'at least' if zero else 'above'} 0 seconds")


def number(value: Any) -> Any:
    """Return `value` as an int if it is an integer's text, else unchanged: a field may be an int or 'auto'."""
    return int(value) if isinstance(value, str) and re.fullmatch("-?[0-9]+", value) else value
