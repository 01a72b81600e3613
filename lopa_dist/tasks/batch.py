"""The user's own prompts: a file, standard input or a dataset, one request per line."""

from __future__ import annotations

import contextlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any

from lopa_dist.own_code import is_own, load
from lopa_dist.tasks.batch_line import (
    ENVELOPE,
    LIMITS,
    MOST_SAMPLES,
    OPTIONS,
    PROMPTS,
    SAMPLING,
    Fields,
    bad_line,
    given_fields,
    is_wrapped,
    items_of,
)
from lopa_dist.tasks.names import line_name
from lopa_dist.tasks.prompt_template import names_in, template_of
from lopa_dist.tasks.response_format import TRIES, ResponseFormat
from lopa_dist.tasks.rows import Row, is_table, kind_of, not_read, rows
from lopa_dist.tasks.task import CannotJudge, Item, Score

log = logging.getLogger("lopa_dist")
TOLD: set[tuple[str, str]] = set()  # messages logged for a source, which is read again for tables and pages
LONGEST_NUMBER = 19  # characters of a number that is shown
NOTHING = ("NULL", "null", "NaN", "nan", "None", "N/A")  # what programs write for a missing value
NUMBERS = (*LIMITS, *SAMPLING, "n", "best_of", "top_logprobs", "presence_penalty", "frequency_penalty")


class Batch:
    """A task of lines, each in either convention of `batch_line.py`.

    A line that cannot be used becomes an item with an error that names the line and the remedy.

    Args:
        input: a source of `rows.py`.
        limit: the most lines to take; None: all.
        column: the field that holds the prompt, or the messages if it is a list. None: `prompt` or `messages`.
        prompt: a template of the prompt, with fields in braces, in place of a column.
        id: the field that names requests; None: `custom_id` or `id`.
        samples: how many answers a line gets if it does not say so itself.
        tries: the most answers to generate if JSON is asked for (`response_format`).
        response_format: what the answers to a line must be if it does not say so itself (`read_format`).
        score: how answers are judged: ``exact`` compares them with the field `reference`, ``FILE.py:FUNCTION`` calls a
            function with the text and the fields that pass through. None: they are not judged.
    """

    name = "batch"
    options = ("input", "column", "prompt", "id", "samples", "tries", "response_format", "score")
    reads_stdin = True  # task.input=-
    of_lines = True

    @staticmethod
    def check(options: Any) -> None:
        """Raise a ValueError if the section `task` names no source, or too many samples."""
        if not options.input:
            raise ValueError("task.input: task=batch needs a file, e.g. task.input=prompts.jsonl (or - for stdin)")
        if options.samples > MOST_SAMPLES:
            raise ValueError(f"task.samples={options.samples}: at most {MOST_SAMPLES} answers per prompt")

    def __init__(
        self,
        input: str,
        limit: int | None = None,
        column: str | None = None,
        prompt: str | None = None,
        id: str | None = None,
        samples: int = 1,
        tries: int = TRIES,
        response_format: Any = None,
        score: str | None = None,
    ) -> None:
        self.source, self.limit, self.table = input, limit, is_table(input)
        self.fields = Fields(column, None if prompt is None else template_of(prompt), id, self.table)
        self.texts = kind_of(input) in (".csv", ".tsv")
        self.needed = [] if self.fields.template is None else names_in(self.fields.template)
        self.defaults: dict[str, Any] = {"n": samples}
        if response_format is not None:
            self.defaults["response_format"] = read_format(response_format)
        self.rule, self.tries = score, tries
        self.lacking: str | None = None  # what the first line lacks; empty once a line has all that is asked for
        self.judge = load(score, "task.score") if score is not None and is_own(score) else exact

    def items(self) -> Iterable[Item]:
        """Yield the items of at most `limit` lines, in order; blank lines are skipped. Log `notes` at the end.

        Raises:
            ValueError: a table has no column of prompts, or no line has a field that the settings name.
        """
        seen: dict[str, int] = {}
        fields, words, failed = Counter[str](), Counter[str | None](), 0
        firsts: dict[str, Any] = {}
        for row in islice(rows(self.source), self.limit):
            if row.value is not None and (self.fields.named or not is_wrapped(row.value)):
                given = [key for key, value in row.value.items() if value is not None]
                firsts |= {key: row.value[key] for key in given if key not in fields and key in NUMBERS}
                fields.update(given)
            failed += row.value is not None and row.value.get("finish_reason") == "error"
            items = self.unique(self.read(row), row.number, seen)
            words.update(item.prompt for item in items if item.prompt in NOTHING)
            yield from (placed(item, row) for item in items)
        if self.lacking:
            raise ValueError(f"task.input={self.source}: none of its lines can be used. {self.lacking}")
        for level, message in self.notes(fields, firsts, words, failed):
            if (self.source, message) not in TOLD:
                TOLD.add((self.source, message))
                log.log(level, "%s", message)

    def notes(
        self, fields: Mapping[str, int], firsts: Mapping[str, Any], words: Mapping[str | None, int], failed: int
    ) -> Iterator[tuple[int, str]]:
        """Yield messages about the lines, each with its log level.

        They say what part of the source is not read, which fields are options or look like one, and which prompts are
        odd.

        Args:
            fields: how many lines have each field.
            firsts: the first value of each option that is a number.
            words: how many prompts are each word of `NOTHING`.
            failed: how many lines are results of an earlier job that ended with an error.
        """
        if failed:
            yield (
                logging.WARNING,
                f"WARNING: lines with finish_reason=error, which an earlier job did not answer: {failed}; leave them "
                "out if its answers are part of these prompts",
            )
        for note in not_read(self.source):
            yield logging.WARNING, f"WARNING: task.input={self.source}: {note}"
        first = {key: f", the first with {n}" for key, n in firsts.items() if 0 < len(str(n)) <= LONGEST_NUMBER}
        if options := [f"{key} ({fields[key]:,} lines{first.get(key, '')})" for key in OPTIONS if key in fields]:
            rename = "a field that should only be passed through needs another name"
            yield logging.INFO, f"options of a line: {', '.join(options)}; {rename}"
        for key in fields if self.fields.named else ():
            if key not in OPTIONS and (near := get_close_matches(key, OPTIONS, 1, 0.8)):
                yield logging.WARNING, f"the column {key} passes through; if it is an option, call it {near[0]}"
        for word, count in words.items():
            yield (
                logging.WARNING,
                f"WARNING: prompts that are the word {word}: {count}; leave them out if they are missing values",
            )

    def read(self, row: Row) -> list[Item]:
        """Return one line's items."""
        reason = row.error or ""
        if row.value is None:
            return [bad_line(row.number, reason)]
        if reason:
            return [self.refused(row.value, row.number, reason)]
        value = row.value
        if reason := self.lacks(value):
            if self.table:
                raise ValueError(f"task.input={self.source}: {reason}")
            if self.lacking is None:
                self.lacking = f"line {row.number}: {reason}"
            if self.fields.named or self.fields.id is not None:
                return [self.refused(value, row.number, reason)]
        else:
            self.lacking = ""
            if not self.fields.named and self.table and isinstance(value.get("body"), dict):
                value = {key: value.get(key) for key in ENVELOPE}
        if self.table:
            value = {key: read_cell(key, content) for key, content in value.items()}
        if self.texts:  # an empty cell of a .csv is an empty text here, as in Parquet
            plain = None if self.needed or "messages" in value else "prompt"
            asked = (*self.needed, self.fields.column or plain)
            value |= {key: "" for key in asked if key and value.get(key, "") is None}
        return [self.configured(item, row.number) for item in items_of(value, row.number, self.fields, **self.defaults)]

    def refused(self, value: dict[str, Any], number: int, reason: str) -> Item:
        """Return the item of a line that cannot be used, with the id, the prompt and the fields that can be read."""
        [item, *_] = items_of(value, number, self.fields)
        assert item.origin is not None
        return replace(bad_line(number, reason, item.origin.custom_id), metadata=item.metadata, prompt=item.prompt)

    def lacks(self, value: dict[str, Any]) -> str:
        """Return which column is missing for the prompt or the name of a line, and what to do; empty if none is."""
        there = f"it has {', '.join(value)}"
        for name in self.needed:
            if name not in value:
                how = "write a column's name exactly, and a brace that is part of the text twice"
                return f"task.prompt asks for {{{name}}}, but {there}; {how}"
        columns = (self.fields.column,) if self.fields.column else PROMPTS
        wrapped = isinstance(value.get("body", ""), dict | None)  # perhaps: in Parquet a body may be null
        if not self.needed and not value.keys() & {*columns} and (self.fields.column or not wrapped):
            return f"no {' or '.join(columns[:2])} in it; {there}: task.column=NAME says which is the prompt"
        if self.fields.id is not None and self.fields.id not in value:
            return f"no {self.fields.id} in it; {there}: task.id=NAME says which names a request"
        return ""

    def configured(self, item: Item, number: int) -> Item:
        """Return the item with the tries of `task.tries`, or with an error if the reference to judge by is missing."""
        if item.response_format is not None:
            item = replace(item, response_format=replace(item.response_format, tries=self.tries))
        fields = given_fields(item.metadata or {})
        if self.rule == "exact" and "reference" not in fields and not item.error:
            there = ", ".join(fields) or "nothing else"
            if "reference" in (item.metadata or {}):
                reason = "reference is empty, and task.score=exact judges by it; give it a value, or leave the line out"
            else:
                reason = f"task.score=exact needs a field reference; besides the prompt there is {there}"
            return replace(item, error=f"line {number}: {reason}")
        if self.rule == "exact" and isinstance(fields.get("reference"), list | dict) and not item.error:
            reason = "task.score=exact compares an answer with a text or a number, and reference is a list or an object"
            return replace(item, error=f"line {number}: {reason}; task.score=FILE.py:FUNCTION may judge by it")
        return item

    def unique(self, items: list[Item], number: int, seen: dict[str, int]) -> list[Item]:
        """Return the items, or one with an error if the line's id, or that of one of its samples, was used before."""
        origin = items[0].origin
        assert origin is not None
        names = [origin.custom_id, *(item.custom_id for item in items)]
        taken = next((name for name in names if name in seen), None)
        if taken is not None:
            nameless = ", which has no name of its own" * (taken == line_name(seen[taken]))
            reason = items[0].error or (
                f"line {number}: {self.fields.id or 'custom_id'} {taken!r} was used in line {seen[taken]}{nameless}; "
                "make it unique"
            )
            custom_id = f"{line_name(number)}+"  # differs from the default name of a line, which a later line may have
            while custom_id in seen:
                custom_id += "+"
            first = items[0]
            origin = replace(origin, custom_id=custom_id)  # its error must not take the place of the first one's answer
            items = [Item(custom_id, first.prompt, error=reason, origin=origin, metadata=first.metadata)]
            names = [custom_id]
        seen.update(dict.fromkeys(names, number))
        return items

    def score(self, item: Item, text: str) -> Score | None:
        """Return what `task.score` says of the text; None if it is not set.

        Raises:
            CannotJudge: the user's function returned something other than it should.
        """
        if self.rule is None:
            return None
        verdict = self.judge(text, deepcopy(given_fields(item.metadata or {})))  # a judge may change what it is given
        right, extracted = verdict if isinstance(verdict, tuple) and len(verdict) == 2 else (verdict, text.strip())
        if right not in (True, False):
            raise CannotJudge(
                f"task.score={self.rule} returned {right!r}: return True or False, or a pair of that and what was read "
                "from the text"
            )
        expected = spellings((item.metadata or {})["reference"])[-1] if self.rule == "exact" else None
        return Score(bool(right), None if extracted is None else str(extracted), expected=expected)


def placed(item: Item, row: Row) -> Item:
    """Return the item with the place of its line in several files, which its error, if any, names, too."""
    if not row.where or not item.origin:
        return item
    error = item.error and item.error.replace(f"line {row.number}: ", f"line {row.number} ({row.where}): ", 1)
    return replace(item, error=error, origin=replace(item.origin, where=row.where))


def exact(text: str, fields: dict[str, Any]) -> bool:
    """Return whether a text equals the reference, apart from white space around them."""
    return text.strip() in (reference.strip() for reference in spellings(fields["reference"]))


def spellings(reference: Any) -> list[str]:
    """Return how texts may spell a reference: a truth value or a number in Python, in JSON, or as an integer."""
    if isinstance(reference, str):
        return [reference]
    found = [str(reference), json.dumps(reference, default=str)]
    return [*found, str(int(reference))] if isinstance(reference, float) and reference.is_integer() else found


def read_cell(column: str, value: Any) -> Any:
    """Return the value that a table's cell stands for: a number, a flag, or JSON (messages, formats, several stops)."""
    if isinstance(value, float) and column in NUMBERS and value.is_integer():
        return int(value)  # a column of integers with empty cells holds floats
    if not isinstance(value, str):
        return value
    if column == "logprobs" and value.lower() in ("true", "false"):  # spreadsheets write TRUE
        return value.lower() == "true"
    if column == "logprobs" and value == "0":
        return 0
    is_json = column in ("messages", "response_format") or (column == "stop" and value.startswith("["))
    for kind in (int, float) if column in NUMBERS else (json.loads,) if is_json else ():
        with contextlib.suppress(ValueError, RecursionError):
            return kind(value)
    return value


def read_format(value: Any) -> dict[str, Any]:
    """Return the setting `task.response_format` as a line would have it.

    Args:
        value: as a line has it, ``json_object``, or ``FILE.json`` with a schema.

    Raises:
        ValueError: the format is unknown, or the file cannot be read.
    """
    found = {"type": value} if isinstance(value, str) else value
    try:
        if isinstance(value, str) and value.endswith(".json"):
            schema = json.loads(Path(value).expanduser().read_text(encoding="utf-8"))
            found = {"type": "json_schema", "json_schema": {"schema": schema}}
        ResponseFormat.of(found)
    except (OSError, ValueError) as error:
        raise ValueError(f"task.response_format={value}: {error}") from error
    return dict(found)
