"""The user's own prompts: a file, standard input or a dataset, one request a line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lopa_dist.tasks.batch_line import ENVELOPE, SIMPLE, bad_line, items_of
from lopa_dist.tasks.rows import HUB, Row, rows
from lopa_dist.tasks.task import Item, Score


class Batch:
    """Lines in either convention of `batch_line.py`, each on its own.

    A line that cannot be used becomes an item with an error that names the line and the remedy. Of a dataset's row (and
    Parquet is one), `column` is the prompt, or the messages if it holds a list; without it, the columns named as a
    line's fields count.
    """

    name = "batch"
    options = ("input", "column")

    def __init__(self, input: str, limit: int | None = None, column: str | None = None) -> None:
        self.source, self.limit, self.column = input, limit, column

    def items(self) -> Iterable[Item]:
        """The items of at most `limit` lines, in order; blank lines are passed over."""
        seen: dict[str, int] = {}
        for count, row in enumerate(rows(self.source)):
            if count == self.limit:
                return
            yield from self.unique(self.read(row), row.number, seen)

    def read(self, row: Row) -> list[Item]:
        """One line's items."""
        if row.value is None:
            return [bad_line(row.number, (row.error or "").removeprefix(f"line {row.number}: "))]
        value = row.value
        if self.column is not None:
            if self.column not in value:
                return [bad_line(row.number, f"no column {self.column!r}; this row has {', '.join(value)}")]
            content: Any = value[self.column]
            value = {"messages" if isinstance(content, list) else "prompt": content}
        elif self.source.startswith(HUB) or self.source.endswith(".parquet"):
            value = {key: content for key, content in value.items() if key in (*SIMPLE, *ENVELOPE)}
        return items_of(value, row.number)

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
