"""What a task gives to a job: items to generate for, and a judgement of what came out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Item:
    """One thing to generate for: a prompt or chat messages, or the reason why its line is unusable."""

    custom_id: str
    prompt: str | None = None
    messages: list[dict[str, str]] | None = None
    max_new_tokens: int | None = None  # null: the decode config's
    error: str | None = None
    reference: Any = field(default=None, compare=False)  # what `score` compares with


@dataclass(frozen=True)
class Score:
    """Whether a text is right, and the answer that was read from it."""

    correct: bool
    extracted: str | None


class Task(Protocol):
    """A named source of items."""

    name: str

    def items(self) -> Iterable[Item]:
        """The items, in input order."""

    def score(self, item: Item, text: str) -> Score | None:
        """Judge a text; null where the task has no right answers."""
