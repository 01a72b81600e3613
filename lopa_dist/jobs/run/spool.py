"""Lists on disk, so that only those of a job's requests that are needed next are in memory."""

from __future__ import annotations

import os
import pickle
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryFile, gettempdir
from typing import Any, BinaryIO, TypeVar

from lopa_dist.atomic import naming

Value = TypeVar("Value")
BLOCK = 16  # values written and read together; few, because requests that run in order of length lie far apart
KEPT = 128  # blocks in memory: most values are read soon after their neighbours


class Packer(pickle.Pickler):
    """Pickles objects of some dataclasses as calls of their class: writing and reading take a third of the time."""

    def __init__(self, file: BinaryIO, kinds: Mapping[type, Callable[[Any], tuple[Any, ...]]]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.kinds = kinds

    def reducer_override(self, value: Any) -> Any:
        """Return how `value` is written."""
        kind = type(value)
        return (kind, self.kinds[kind](value)) if kind in self.kinds else NotImplemented


class Spool(Sequence[Value]):
    """Values in the order in which they were appended.

    Their file is in the system's temporary folder and has no name, so that it is gone with its process, however that
    ends.

    Args:
        kinds: dataclasses of which values consist, each with two or more fields, to read and write these faster.
    """

    def __init__(self, *kinds: type) -> None:
        self.kinds = {kind: attrgetter(*(field.name for field in fields(kind))) for kind in kinds}
        self.file = TemporaryFile()  # noqa: SIM115 - it stays open as long as this is
        self.ends = array("q", [0])  # where the first block begins, and where each block in the file ends
        self.last: list[Value] = []  # the block that is not full
        self.block = lru_cache(KEPT)(self.read)

    def append(self, value: Value) -> None:
        """Add a value, which must not change afterwards."""
        self.last.append(value)
        if len(self.last) == BLOCK:
            with naming(Path(gettempdir(), "a job's requests")):
                Packer(self.file, self.kinds).dump(self.last)
                self.file.flush()
            self.ends.append(self.file.tell())
            self.last = []

    def __len__(self) -> int:
        return (len(self.ends) - 1) * BLOCK + len(self.last)

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number, offset = divmod(index, BLOCK)
        return (self.last if number == len(self.ends) - 1 else self.block(number))[offset]

    def read(self, number: int) -> list[Value]:
        """Return block `number` from the file."""
        begin, end = self.ends[number], self.ends[number + 1]
        block: list[Value] = pickle.loads(os.pread(self.file.fileno(), end - begin, begin))
        return block


class Chosen(Sequence[Value]):
    """Some values of another sequence, by their numbers there."""

    def __init__(self, values: Sequence[Any], numbers: Sequence[int]) -> None:
        self.values, self.numbers = values, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        return self.values[self.numbers[index]]

    def in_any_order(self) -> Iterator[Value]:
        """Yield all values in the order of the other sequence: each block of a `Spool` is then read only once."""
        return (self.values[number] for number in sorted(self.numbers))
