"""Few-shot prompts in the two forms that models take: one plain text, and chat messages.

The layout is lm-evaluation-harness's (0.4.x): question, delimiter, answer, and an empty line between examples. In chat
form every example is a user and an assistant turn (`fewshot_as_multiturn`), or all of it is one user turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lopa_dist.tasks.rows import rows
from lopa_dist.tasks.task import Item


class BadRow(ValueError):
    """A row that cannot become an item; the message says what it lacks."""


@dataclass(frozen=True)
class Example:
    """A question as the prompt shows it, and its answer."""

    question: str
    answer: str


@dataclass(frozen=True)
class Prompts:
    """The examples that every question of a task is preceded by."""

    examples: Sequence[Example]
    delimiter: str = " "  # between question and answer in plain text
    multiturn: bool = True

    @cached_property
    def prefix(self) -> str:
        """The examples as one text."""
        return "".join(f"{example.question}{self.delimiter}{example.answer}\n\n" for example in self.examples)

    def messages(self, question: str) -> list[dict[str, str]]:
        """Turns that end with the user's."""
        if not self.multiturn:
            return [{"role": "user", "content": self.prefix + question}]
        turns = []
        for example in self.examples:
            turns.append({"role": "user", "content": example.question})
            turns.append({"role": "assistant", "content": example.answer})
        return [*turns, {"role": "user", "content": question}]

    def item(self, custom_id: str, question: str, stop: tuple[str, ...], reference: Any) -> Item:
        """A question in both forms; the job keeps the one that fits the model."""
        plain, messages = self.prefix + question, self.messages(question)
        return Item(custom_id, prompt=plain, messages=messages, prefix=self.prefix, stop=stop, reference=reference)


def text_field(row: dict[str, Any], *names: str) -> str:
    """The first of these fields that the row has, as text.

    Raises:
        BadRow: there is none, or it is not text.
    """
    for name in names:
        if isinstance(row.get(name), str):
            return str(row[name])
    raise BadRow(f"no text in {' or '.join(names)}")


def read_examples(source: str, count: int, make: Callable[[dict[str, Any]], Example | None]) -> list[Example]:
    """The first `count` examples of a source.

    Raises:
        ValueError: the source cannot be read, or has fewer usable rows.
    """
    key, examples = "task.fewshot_input", []
    if count:
        for row in rows(source, key):
            try:
                example = None if row.value is None else make(row.value)
            except BadRow as error:
                raise ValueError(f"{key}={source}: row {row.number}: {error}") from error
            if example is not None:
                examples.append(example)
            if len(examples) == count:
                break
    if len(examples) < count:
        raise ValueError(
            f"{key}={source}: {len(examples)} examples of {count}; lower task.fewshot or name another file"
        )
    return examples
