"""The user's own prompts: a file, standard input or a dataset, one request a line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lopa_dist.tasks.batch_line import ENVELOPE, LIMITS, PROMPTS, SAMPLING, bad_line, items_of
from lopa_dist.tasks.rows import Row, ending, is_table, rows
from lopa_dist.tasks.task import Item, Score


class Batch:
    """Lines in either convention of `batch_line.py`, each on its own.

    A line that cannot be used becomes an item with an error that names the line and the remedy.

    Args:
        input: a source of `rows.py`.
        limit: so many lines; None: all.
        column: the field that holds the prompt, or the messages if it is a list; all others pass through to the
            results. None: fields mean what they are called.
        samples: of a line that does not say how many.
    """

    name = "batch"
    options = ("input", "column", "samples")

    def __init__(self, input: str, limit: int | None = None, column: str | None = None, samples: int = 1) -> None:
        self.source, self.limit, self.column, self.samples = input, limit, column, samples

    def items(self) -> Iterable[Item]:
        """The items of at most `limit` lines, in order; blank lines are passed over.

        Raises:
            ValueError: a table without a column of prompts.
        """
        seen: dict[str, int] = {}
        for count, row in enumerate(rows(self.source)):
            if count == self.limit:
                return
            yield from self.unique(self.read(row), row.number, seen)

    def read(self, row: Row) -> list[Item]:
        """One line's items."""
        if row.value is None:
            return [bad_line(row.number, (row.error or "").removeprefix(f"line {row.number}: "))]
        value, wanted = row.value, (self.column,) if self.column else (*PROMPTS, "body")
        if not value.keys() & {*wanted}:
            reason = (
                f"no {' or '.join(wanted)} in it; it has {', '.join(value)}: task.column=NAME says which is the prompt"
            )
            if is_table(self.source):
                raise ValueError(f"task.input={self.source}: {reason}")
            if self.column:
                return [bad_line(row.number, reason)]
        elif self.column is None and is_table(self.source) and value.get("body") is not None:
            value = {key: value.get(key) for key in ENVELOPE}
        if ending(Path(self.source)) in (".csv", ".tsv"):
            value = {key: read_cell(key, content) for key, content in value.items()}
        return items_of(value, row.number, self.samples, self.column)

    def unique(self, items: list[Item], number: int, seen: dict[str, int]) -> list[Item]:
        """The items, or one with an error if an id was used before: the line's own, or one of its samples'."""
        origin = items[0].origin
        assert origin is not None
        names = [origin.custom_id, *(item.custom_id for item in items)]
        taken = next((name for name in names if name in seen), None)
        if taken is not None:
            reason = items[0].error or (
                f"line {number}: custom_id {taken!r} was used in line {seen[taken]}; make it unique"
            )
            custom_id = f"line-{number}"
            while custom_id in seen:
                custom_id += "+"
            items, names = [Item(custom_id, error=reason, origin=origin)], [custom_id]
        seen.update(dict.fromkeys(names, number))
        return items

    def score(self, item: Item, text: str) -> Score | None:
        """No right answers are known."""
        return None


def read_cell(column: str, text: str | None) -> Any:
    """What a text of a `.csv` table stands for: options are numbers, and messages are JSON."""
    kinds = (json.loads,) if column == "messages" else (int, float) if column in (*LIMITS, *SAMPLING, "n") else ()
    for kind in kinds if text is not None else ():
        try:
            return kind(str(text))
        except (ValueError, RecursionError):
            pass
    return text
