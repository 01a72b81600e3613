"""Reading many files at once, more than a process may hold open: a journal of 1,000 parts, an array of 1,000 shards."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

OPEN = 200  # files; a process is usually allowed 1,024
READ_BYTES = 1 << 16  # at a time


class OpenFiles:
    """Files that are read at any place, of which the `OPEN` used last are kept open."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, BinaryIO] = OrderedDict()

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._open.values():
            file.close()

    def read(self, path: Path, offset: int, length: int) -> bytes:
        """Return `length` bytes of a file from `offset` on."""
        file = self._open.pop(path, None)
        if file is None:
            if len(self._open) >= OPEN:
                self._open.popitem(last=False)[1].close()
            file = path.open("rb")
        self._open[path] = file
        file.seek(offset)
        return file.read(length)


def lines_of(path: Path) -> Iterator[str]:
    """Yield the lines of a file, which is open only while some of them are read."""
    offset = 0
    while True:
        with path.open("rb") as file:
            file.seek(offset)
            some = file.readlines(READ_BYTES)
            offset = file.tell()
        if not some:
            return
        yield from (line.decode(errors="replace") for line in some)
