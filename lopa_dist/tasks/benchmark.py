"""What the benchmarks share: a problem is a row of a data source, and may stand behind worked examples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, ClassVar

from lopa_dist.tasks.fewshot import BadRow, Example, Prompts, read_examples
from lopa_dist.tasks.rows import rows
from lopa_dist.tasks.task import Item


class Benchmark(ABC):
    """A task whose items are made of the rows of `input`, or of the benchmark's own test set.

    A row that cannot be used becomes an item with an error.
    """

    name: str
    test: str  # the test set, which is read if the user names no other source
    options: ClassVar[tuple[str, ...]] = ("input",)

    def __init__(self, input: str | None = None, limit: int | None = None) -> None:
        self.source, self.limit = input or self.test, limit

    @abstractmethod
    def item(self, number: int, row: dict[str, Any]) -> Item | None:
        """Return the item of a row and its number, from 1; None passes the row over.

        Raises:
            BadRow: the row is not of this benchmark.
        """

    def items(self) -> Iterable[Item]:
        """Return the first `limit` items."""
        return islice(self.all_items(), self.limit)

    def all_items(self) -> Iterator[Item]:
        """Yield the items of all rows."""
        for row in rows(self.source):
            custom_id = f"{self.name}-{row.number}"
            if row.value is None:
                yield Item(custom_id, error=row.error)
                continue
            try:
                item = self.item(row.number, row.value)
            except BadRow as error:
                message = f"row {row.number}: {error}; task={self.name} needs a file in the benchmark's own format"
                item = Item(custom_id, error=message)
            if item is not None:
                yield item


class FewshotBenchmark(Benchmark):
    """A benchmark whose questions stand behind `fewshot` worked examples, the first ones of `fewshot_input`."""

    options = (*Benchmark.options, "fewshot", "fewshot_input", "fewshot_as_multiturn")
    usual_fewshot = 4
    delimiter = " "  # between question and answer in plain text

    def __init__(
        self,
        input: str | None = None,
        limit: int | None = None,
        fewshot: int | None = None,
        fewshot_input: str | None = None,
        fewshot_as_multiturn: bool = True,
    ) -> None:
        super().__init__(input, limit)
        count = self.usual_fewshot if fewshot is None else fewshot
        examples = read_examples(fewshot_input or self.own_examples(), count, self.example)
        self.prompts = Prompts(examples, self.delimiter, fewshot_as_multiturn)

    @abstractmethod
    def own_examples(self) -> str:
        """Return the source of the examples if the user names none."""

    @abstractmethod
    def example(self, row: dict[str, Any]) -> Example | None:
        """Return a row as a worked example, or None if it is not set aside for that.

        Raises:
            BadRow: the row is not of this benchmark.
        """
