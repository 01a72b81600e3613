"""Hashes of all items of a task: they tell whether an input is still the one that a run had, or another run's."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import replace

from lopa_dist.tasks.task import Item

WRONG = "wrong"  # stands for what is wrong with an item


class HashedItems:
    """An iterable over a task's items that hashes them. All shards of one input get the same hashes.

    Its other members are known when all items have been iterated over.

    Attributes:
        draws: whether an item has a temperature of its own, above 0.
    """

    def __init__(self, items: Iterable[Item]) -> None:
        self.items, self.sum, self.of_prompts = items, hashlib.sha256(), hashlib.sha256()
        self.draws = False

    def __iter__(self) -> Iterator[Item]:
        for item in self.items:
            whole = replace(item, error=WRONG) if item.error else item  # another version has other words for it
            self.sum.update(repr(whole).encode("utf-8", "surrogatepass"))  # all of it, including the reference
            if not (item.origin and item.origin.sample):
                self.of_prompts.update(repr(asked_of(item)).encode("utf-8", "surrogatepass"))
            self.draws |= bool(item.sampling.temperature)
            yield item

    def digest(self) -> str:
        """Return the hash of all that items have."""
        return self.sum.hexdigest()[:24]

    def prompts(self) -> str:
        """Return the hash of what the items ask (`asked_of`), whatever their number of samples and sampling options."""
        return self.of_prompts.hexdigest()[:24]


def asked_of(item: Item) -> tuple[object, ...]:
    """Return what an item asks: the name of its prompt, its texts, and what its answer is compared with."""
    name = item.origin.custom_id if item.origin else item.custom_id
    texts = item.prompt, item.messages, item.answer_prefix, item.suffix, item.continuations
    return name, *texts, item.error and WRONG, item.reference, item.metadata
