"""A hash of all items of a task: it tells whether an input is still the one that a run had."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

from lopa_dist.tasks.task import Item


class HashedItems:
    """An iterable over a task's items that hashes them. All shards of one input get the same hash."""

    def __init__(self, items: Iterable[Item]) -> None:
        self.items, self.sum = items, hashlib.sha256()

    def __iter__(self) -> Iterator[Item]:
        for item in self.items:
            self.sum.update(repr(item).encode("utf-8", "surrogatepass"))  # all of it, including the reference
            yield item

    def digest(self) -> str:
        """Return the hash; call this after iterating over all items."""
        return self.sum.hexdigest()[:24]
