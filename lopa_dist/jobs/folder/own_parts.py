"""How many parts of its output a run has written: by these, and not by its answers, it knows its own parts again."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from lopa_dist.jobs.folder.part_names import part_name
from lopa_dist.remote import is_remote

NAME = "parts.json"  # in the journal's folder


def parts_written(folder: Path, out: str) -> int:
    """Return how many first parts of the output `out` the run in `folder` has written; 0 if it wrote elsewhere.

    Also 0 for remote outputs, whose parts are never removed.
    """
    if is_remote(out):
        return 0
    with suppress(OSError, ValueError, AttributeError):
        noted = json.loads((folder / "journal" / NAME).read_text(encoding="utf-8"))
        return int(noted["parts"]) if noted.get("output") == place_of(out) else 0
    return 0


def note_parts(folder: Path, out: str, parts: int) -> None:
    """Note that the run in `folder`, if it has a journal, has written this many first parts of the output `out`."""
    journal = folder / "journal"
    if journal.is_dir():  # not so where shards were merged
        text = json.dumps({"output": place_of(out), "parts": parts})
        (journal / NAME).write_text(text + "\n", encoding="utf-8")


def place_of(out: str) -> str:
    """Return the absolute path of an output's pattern: a job may be started again from another folder."""
    return str(Path(out).expanduser().absolute())


def remove_parts(out: str, first: int, last: int) -> None:
    """Remove the parts of a local output from number `first` to before `last`."""
    for number in range(first, last):
        Path(part_name(out, number)).expanduser().unlink(missing_ok=True)
