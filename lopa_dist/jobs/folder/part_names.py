"""The parts of an output such as `answers/part-*.parquet`: their names, and which parts there are."""

from __future__ import annotations

import glob
import re
from pathlib import Path, PurePosixPath

from lopa_dist.remote import is_remote, opened

KEY = "task.output"  # the setting that names an output
ANSWERS = 1000  # the most in a part


def place_of(name: str) -> str:
    """Return what identifies a file: its URL, or its path without links."""
    name = name.removeprefix("file://")
    return name if "://" in name else str(Path(name).expanduser().resolve())


def in_parts(out: str) -> bool:
    """Return whether an output is written in parts."""
    return "*" in PurePosixPath(out).name


def part_name(out: str, number: int) -> str:
    """Return the name of part `number`, from 0: `answers/part-00000.parquet`."""
    return out.replace("*", f"{number:05d}")


def parts_of(out: str, answers: int) -> list[tuple[str, int]]:
    """Return the names of the parts that hold so many answers, at least one, and how many each may hold."""
    return [(part_name(out, number), ANSWERS) for number in range(max(1, -(-answers // ANSWERS)))]


def is_missing(out: str, begun: str = "", answers: int = 0) -> bool:
    """Return whether an output on this machine is missing, or any of its parts.

    Args:
        out: the output; one that is remote does not count as missing.
        begun: the folder in which a relative path begins.
        answers: how many it has.
    """
    names = [name for name, _ in parts_of(out, answers)] if in_parts(out) else [out]
    return not is_remote(out) and not all(Path(begun, Path(name).expanduser()).exists() for name in names)


def parts_there(out: str, key: str) -> dict[int, str]:
    """Return the names of the parts that exist, by number; raise a ValueError with `key` if that cannot be told."""
    if is_remote(out):
        system, inside = opened(out, key)
        found = [PurePosixPath(path).name for path in system.glob(literal(inside))]
    else:
        place = Path(out).expanduser()
        found = [path.name for path in place.parent.glob(literal(place.name))]
    before, after = PurePosixPath(out).name.split("*")
    pattern = re.compile(rf"{re.escape(before)}(\d{{5,}}){re.escape(after)}")
    return {int(match[1]): name for name in sorted(found) if (match := pattern.fullmatch(name))}


def literal(name: str) -> str:
    """Return a pattern of which only the stars stand for other text, not brackets or question marks."""
    return "*".join(map(glob.escape, name.split("*")))
