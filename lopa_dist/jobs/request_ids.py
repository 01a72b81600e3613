"""The ids of a job's requests, packed: 24 bytes each, and 32 more once they are looked up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lopa_dist.ragged import Ints

LENGTH = 24  # hexadecimal digits


class RequestIds:
    """By input index, a request's id, or null where the item was rejected."""

    def __init__(self, ids: Iterable[str | None] = ()) -> None:
        self.packed = bytearray()
        for name in ids:
            self.append(name)

    def append(self, name: str | None) -> None:
        """Add the next one; when all are there, the first look-up sorts them."""
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

    def find(self, names: Sequence[str]) -> Ints:
        """The indices of some ids; -1 for those that are not there."""
        if not len(self) or not names:
            return np.full(len(names), -1)
        ids, order = self.order
        wanted = np.array([name.encode() for name in names])
        at = np.minimum(np.searchsorted(ids, wanted), len(ids) - 1)
        return np.where((ids[at] == wanted) & (wanted != b""), order[at], -1)
