"""A note of how many parts of its output a run has written, by which it recognises its own parts."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path

from lopa_dist.atomic import write_lines
from lopa_dist.jobs.folder.part_names import part_name, place_of
from lopa_dist.remote import is_remote

NAME = "parts.json"  # in the journal's folder


def parts_written(folder: Path, out: str) -> int:
    """Return how many first parts of the output `out` the run in `folder` has written; 0 if it wrote elsewhere.

    Also 0 for remote outputs, whose parts are never removed.
    """
    if is_remote(out):
        return 0
    with suppress(OSError, ValueError, AttributeError, KeyError, TypeError):
        noted = json.loads((folder / "journal" / NAME).read_text(encoding="utf-8"))
        return int(noted["parts"]) if noted.get("output") == place_of(out) else 0
    return 0


def note_parts(folder: Path, out: str, parts: int) -> None:
    """Note that the run in `folder` writes at least this many first parts of the output `out`."""
    write(folder, out, max(parts, parts_written(folder, out)))


def keep_parts(folder: Path, out: str, parts: int) -> None:
    """Remove all parts of the output `out` that the run in `folder` has written but the first `parts`."""
    written = parts_written(folder, out)
    for number in range(parts, written):
        Path(part_name(out, number)).expanduser().unlink(missing_ok=True)
    if written > parts:
        write(folder, out, parts)


def write(folder: Path, out: str, parts: int) -> None:
    """Write the note, if the run has a journal: where shards were merged, there is none."""
    if (folder / "journal").is_dir():
        text = json.dumps({"output": place_of(out), "parts": parts})
        write_lines(folder / "journal" / NAME, [text, "\n"])


def carry_over(old: Path, journal: Path) -> None:
    """Copy the note into the folder of a new journal from that of the `old` one, which was set aside.

    The parts themselves stay where they are: the new job, which may replace them, must know that they are its own.
    """
    if (old / NAME).exists():
        journal.mkdir()
        shutil.copyfile(old / NAME, journal / NAME)
