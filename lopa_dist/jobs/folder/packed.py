"""What a job keeps of each of many requests: ids and figures, packed into a few bytes of memory."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lopa_dist.ragged import Ints

LENGTH = 24  # hexadecimal digits of an id
NAN = float("nan")


class RequestIds:
    """Requests' ids by input index, None if the item was rejected: 24 bytes each, and 32 more after a look-up."""

    def __init__(self) -> None:
        self.packed = bytearray()

    def append(self, name: str | None) -> None:
        """Add the next id; all must be there before the first look-up, which sorts them."""
        self.packed += (name or "").encode().ljust(LENGTH, b"\0")

    def __len__(self) -> int:
        return len(self.packed) // LENGTH

    def __getitem__(self, index: int) -> str | None:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.packed[index * LENGTH : (index + 1) * LENGTH].rstrip(b"\0").decode() or None

    @cached_property
    def order(self) -> tuple[NDArray[Any], Ints]:
        """All ids in ascending order, and their indices."""
        ids = np.frombuffer(self.packed, f"S{LENGTH}")
        order = np.argsort(ids, kind="stable")
        return ids[order], order

    def repeated(self) -> int | None:
        """Return the index of an id that an earlier one equals; None if they are all different."""
        ids, order = self.order
        again = np.flatnonzero((ids[1:] == ids[:-1]) & (ids[1:] != b""))
        return int(order[again[0] + 1]) if len(again) else None

    def find(self, names: Sequence[str]) -> Ints:
        """Return the indices of some ids; -1 for those that are not there."""
        if not len(self) or not names:
            return np.full(len(names), -1)
        ids, order = self.order
        wanted = np.array([name.encode() for name in names])
        places = np.minimum(np.searchsorted(ids, wanted), len(ids) - 1)
        return np.where((ids[places] == wanted) & (wanted != b""), order[places], -1)


class Columns:
    """Rows of numbers by name, kept as columns. A number that a row lacks, or has as null, is nan in its column."""

    def __init__(self) -> None:
        self.columns: dict[str, array[float]] = {}
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row; a number ``below`` in a mapping ``name`` counts as ``name.below``."""
        for name, value in row.items():
            if isinstance(value, Mapping):
                for below, number in value.items():
                    self.put(f"{name}.{below}", number)
            else:
                self.put(name, value)
        self.count += 1

    def put(self, name: str, value: float | None) -> None:
        """Set a number of the row that is being added."""
        column = self.columns.setdefault(name, array("d"))
        column.extend([NAN] * (self.count - len(column)))
        column.append(NAN if value is None else value)

    def __getitem__(self, name: str) -> NDArray[np.float64]:
        found = np.full(self.count, NAN)
        column = self.columns.get(name, array("d"))
        found[: len(column)] = column
        return found

    def known(self, name: str) -> NDArray[np.float64]:
        """Return the column `name` without nan."""
        column = self[name]
        return column[~np.isnan(column)]
