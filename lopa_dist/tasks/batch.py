"""The user's own prompts: JSONL, one request a line."""

from __future__ import annotations

import gzip
import io
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from lopa_dist.tasks.task import Item, Score

FIELDS = ("prompt", "messages", "custom_id", "max_tokens")


class Batch:
    """Lines with `prompt` (text) or `messages` (chat), optionally `custom_id` and `max_tokens`.

    A line that cannot be used becomes an item with an error that names the line and the remedy.
    """

    name = "batch"

    def __init__(self, source: str, limit: int | None = None) -> None:
        self.source, self.limit = source if source == "-" else str(Path(source).expanduser()), limit
        if source != "-" and not Path(self.source).is_file():
            raise ValueError(f"task.input={source}: no such file")

    def open(self) -> TextIO:
        """The lines, as UTF-8 text; bytes that are not UTF-8 become lone surrogates, which `parse` refuses."""
        if self.source == "-":
            return io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8-sig", errors="surrogateescape")
        if self.source.endswith(".gz"):
            return gzip.open(self.source, "rt", encoding="utf-8-sig", errors="surrogateescape")
        return open(self.source, encoding="utf-8-sig", errors="surrogateescape")

    def items(self) -> Iterable[Item]:
        """One item a line, in order; blank lines are passed over."""
        try:
            yield from self._items()
        except (OSError, EOFError) as error:
            raise ValueError(f"task.input={self.source}: cannot be read ({error})") from error

    def _items(self) -> Iterable[Item]:
        seen: dict[str, int] = {}
        with self.open() as lines:
            count = 0
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                if count == self.limit:
                    return
                count += 1
                item = parse(line, number)
                if item.custom_id in seen and not item.error:
                    first = seen[item.custom_id]
                    message = f"line {number}: custom_id {item.custom_id!r} was used in line {first}; make it unique"
                    item = Item(f"line-{number}", error=message)
                seen[item.custom_id] = number
                yield item

    def score(self, item: Item, text: str) -> Score | None:
        """No right answers are known."""
        return None


def parse(line: str, number: int) -> Item:
    """One line; everything wrong with it ends in the item's `error`."""
    fallback = f"line-{number}"
    try:
        raw: Any = json.loads(line)
        json.dumps(raw, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return Item(fallback, error=f"line {number}: not UTF-8, or half of a surrogate pair; write UTF-8")
    except (ValueError, RecursionError) as error:
        return Item(fallback, error=f"line {number}: not JSON ({error}); write one JSON object a line")
    if not isinstance(raw, dict):
        return Item(fallback, error=f'line {number}: not a JSON object; write {{"prompt": "..."}}')
    custom_id = raw.get("custom_id", fallback)
    if not isinstance(custom_id, str) or not custom_id:
        return Item(fallback, error=f"line {number}: custom_id must be a non-empty string")

    def bad(message: str) -> Item:
        return Item(custom_id, error=f"line {number}: {message}")

    unknown = sorted(set(raw) - set(FIELDS))
    if unknown:
        return bad(f"unknown field {', '.join(map(repr, unknown))}; known: {', '.join(FIELDS)}")
    prompt, messages, most = raw.get("prompt"), raw.get("messages"), raw.get("max_tokens")
    if (prompt is None) == (messages is None):
        return bad("give either prompt or messages")
    if prompt is not None and (not isinstance(prompt, str) or not prompt.strip()):
        return bad("prompt must be a non-empty string")
    if messages is not None and not _are_messages(messages):
        return bad('messages must be a non-empty list of {"role": "...", "content": "..."}')
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        return bad(f"max_tokens={most!r} must be an integer of at least 1")
    return Item(custom_id, prompt, messages, most)


def _are_messages(value: Any) -> bool:
    def is_message(m: Any) -> bool:
        return isinstance(m, dict) and all(isinstance(m.get(key), str) for key in ("role", "content"))

    return isinstance(value, list) and bool(value) and all(is_message(m) for m in value)
