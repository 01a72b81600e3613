"""The lessons of a job, beside its journal, so that later attempts know of them."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

NAME = "lessons.jsonl"


def add_lesson(journal: Path, lesson: dict[str, Any]) -> None:
    """Append the outcome of a lesson, and make sure that it is on disk."""
    with (journal / NAME).open("a", encoding="utf-8") as file:
        file.write(json.dumps(lesson) + "\n")
        file.flush()
        os.fsync(file.fileno())


def lessons_in(journal: Path) -> list[dict[str, Any]]:
    """Return the outcomes of all lessons so far; a line that a kill cut short does not count."""
    if not (journal / NAME).exists():
        return []
    found = []
    for line in (journal / NAME).read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):
            found.append(json.loads(line))
    return [one for one in found if isinstance(one, dict)]
