"""Reading many files at once, more than a process may hold open: a journal of 1,000 parts, an array of 1,000 shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from mmap import ACCESS_READ, mmap
from pathlib import Path

OPEN = 200  # files; a process is usually allowed 1,024
READ_BYTES = 1 << 16  # at a time


def mapped_files() -> Callable[[Path], mmap]:
    """Return a function that maps a file into memory and keeps its last `OPEN` maps; each map holds its file open."""

    def mapped(path: Path) -> mmap:
        with path.open("rb") as file:
            return mmap(file.fileno(), 0, access=ACCESS_READ)

    return lru_cache(OPEN)(mapped)


def lines_of(path: Path) -> Iterator[str]:
    """Yield the lines of a file, which is open only while some of them are read."""
    offset = 0
    while True:
        with path.open("rb") as file:
            file.seek(offset)
            lines = file.readlines(READ_BYTES)
            offset = file.tell()
        if not lines:
            return
        yield from (line.decode(errors="replace") for line in lines)
