"""Stop strings: where a text ends because the task or the user says so."""

from __future__ import annotations

from collections.abc import Iterable


def cut(text: str, stops: Iterable[str]) -> str | None:
    """The text before the earliest stop string, or null if it holds none."""
    found = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    return text[: min(found)] if found else None
