"""The user's own prompts: a file, standard input or a dataset, one request a line."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lopa_dist.own_code import is_own, load
from lopa_dist.tasks.batch_line import ENVELOPE, LIMITS, PROMPTS, SAMPLING, bad_line, items_of
from lopa_dist.tasks.response_format import TRIES
from lopa_dist.tasks.rows import Row, ending, is_table, rows
from lopa_dist.tasks.task import CannotJudge, Item, Score


class Batch:
    """Lines in either convention of `batch_line.py`, each on its own.

    A line that cannot be used becomes an item with an error that names the line and the remedy.

    Args:
        input: a source of `rows.py`.
        limit: the most lines to take; None: all.
        column: the field that holds the prompt, or the messages if it is a list; all others pass through to the
            results. None: fields mean what they are called.
        samples: how many answers a line gets that does not say.
        tries: the most answers to generate where JSON is asked for (`response_format`).
        score: how answers are judged: ``exact`` compares them with the field `reference`, ``FILE.py:FUNCTION`` calls a
            function with the text and the fields that pass through. None: they are not judged.
    """

    name = "batch"
    options = ("input", "column", "samples", "tries", "score")

    def __init__(
        self,
        input: str,
        limit: int | None = None,
        column: str | None = None,
        samples: int = 1,
        tries: int = TRIES,
        score: str | None = None,
    ) -> None:
        self.source, self.limit, self.column, self.samples = input, limit, column, samples
        self.rule, self.tries = score, tries
        self.judge = load(score, "task.score") if score is not None and is_own(score) else exact

    def items(self) -> Iterable[Item]:
        """The items of at most `limit` lines, in order; blank lines are skipped.

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
        value = row.value
        columns = (self.column,) if self.column else (*PROMPTS, "body")
        if not value.keys() & {*columns}:
            there = f"no {' or '.join(columns[:2])} in it; it has {', '.join(value)}"
            reason = f"{there}: task.column=NAME says which is the prompt"
            if is_table(self.source):
                raise ValueError(f"task.input={self.source}: {reason}")
            if self.column:
                return [bad_line(row.number, reason)]
        elif self.column is None and is_table(self.source) and value.get("body") is not None:
            value = {key: value.get(key) for key in ENVELOPE}
        if ending(Path(self.source)) in (".csv", ".tsv"):
            value = {key: read_cell(key, content) for key, content in value.items()}
        return [self.configured(item, row.number) for item in items_of(value, row.number, self.samples, self.column)]

    def configured(self, item: Item, number: int) -> Item:
        """The item with as many tries as `task.tries` says; with an error if the reference to judge by is missing."""
        if item.response_format is not None:
            item = replace(item, response_format=replace(item.response_format, tries=self.tries))
        fields = item.metadata or {}
        if self.rule == "exact" and "reference" not in fields and not item.error:
            there = ", ".join(fields) or "nothing else"
            reason = f"task.score=exact needs a field reference; besides the prompt there is {there}"
            return replace(item, error=f"line {number}: {reason}")
        return item

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
        """What `task.score` says of the text; None without it.

        Raises:
            CannotJudge: the user's function returned something else than it should.
        """
        if self.rule is None:
            return None
        verdict = self.judge(text, item.metadata or {})
        right, extracted = verdict if isinstance(verdict, tuple) and len(verdict) == 2 else (verdict, text.strip())
        if right not in (True, False):
            raise CannotJudge(
                f"task.score={self.rule} returned {right!r}: return True or False, or a pair of that and what was read "
                "from the text"
            )
        return Score(bool(right), None if extracted is None else str(extracted))


def exact(text: str, fields: dict[str, Any]) -> bool:
    """Whether a text equals the reference, apart from spaces around it."""
    return text.strip() == str(fields["reference"]).strip()


def read_cell(column: str, text: str | None) -> Any:
    """The value that a text in a `.csv` table stands for: a number, a flag, or JSON (messages and formats)."""
    if text is None:
        return None
    if column == "logprobs" and text.lower() in ("true", "false"):  # spreadsheets write TRUE
        return text.lower() == "true"
    is_number = column in (*LIMITS, *SAMPLING, "n")
    for kind in (int, float) if is_number else (json.loads,) if column in ("messages", "response_format") else ():
        with contextlib.suppress(ValueError, RecursionError):
            return kind(text)
    return text
