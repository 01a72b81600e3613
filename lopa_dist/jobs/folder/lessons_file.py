"""The lessons of a job, beside its journal, so that later attempts know of them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lopa_dist.encodable import json_line

NAME = "lessons.jsonl"


def add_lessons(journal: Path, lessons: Iterable[dict[str, Any]]) -> None:
    """Append the outcomes of lessons, and make sure that they are on disk."""
    with (journal / NAME).open("a", encoding="utf-8") as file:
        file.write("\n")  # ends a line that a kill cut short
        file.writelines(map(json_line, lessons))
        file.flush()
        os.fsync(file.fileno())


def lessons_in(journal: Path) -> list[dict[str, Any]]:
    """Return the outcomes of all lessons so far; a line that is no JSON, as after a kill, does not count."""
    if not (journal / NAME).exists():
        return []
    found = []
    for line in (journal / NAME).read_text(encoding="utf-8", errors="replace").split("\n"):
        with suppress(ValueError):
            found.append(json.loads(line))
    return [one for one in found if isinstance(one, dict)]
