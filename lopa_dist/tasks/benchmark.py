"""What the benchmarks share: a problem is a row of a data source, and worked examples may precede it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, ClassVar

from lopa_dist.tasks.names import sample_name
from lopa_dist.tasks.rows import rows
from lopa_dist.tasks.task import Item, Origin


class BadRow(ValueError):
    """A row that cannot become an item; the message says what it lacks."""


@dataclass(frozen=True)
class Example:
    """A question as the prompt shows it, and its answer."""

    question: str
    answer: str


class Benchmark(ABC):
    """A task whose items are made of the rows of `input`, or of the benchmark's own test set.

    A row that cannot be used becomes an item with an error.
    """

    name: str
    test: str  # the test set, which is read if the user names no other source
    options: ClassVar[tuple[str, ...]] = ("input",)
    draws = False

    def __init__(self, input: str | None = None, limit: int | None = None) -> None:
        self.source, self.limit = input or self.test, limit

    @abstractmethod
    def item(self, number: int, row: dict[str, Any]) -> Item | None:
        """Return the item of `row`, whose `number` counts from 1; None skips the row.

        Raises:
            BadRow: the row is not of this benchmark.
        """

    def items(self) -> Iterable[Item]:
        """Return the first `limit` items."""
        return islice(named_apart(list(self.all_items())), self.limit)

    def all_items(self) -> Iterator[tuple[int, Item]]:
        """Yield the number of each row, and its item."""
        for row in rows(self.source):
            custom_id = f"{self.name}-{row.number}"
            if row.value is None or row.error:
                yield row.number, Item(custom_id, error=f"line {row.number}: {row.error}")
                continue
            try:
                item = self.item(row.number, row.value)
            except BadRow as error:
                message = f"row {row.number}: {error}; task={self.name} needs a file in the benchmark's own format"
                item = Item(custom_id, error=message)
            if item is not None:
                yield row.number, item


def named_apart(items: Sequence[tuple[int, Item]]) -> Iterator[Item]:
    """Yield the items, each under its own name: a file may hold a problem several times, for several samples of it.

    These are called as the samples of a line are: ``HumanEval/0#0``, ``HumanEval/0#1``.

    Args:
        items: each after the number of its row.
    """
    times, samples = Counter(item.custom_id for _, item in items), Counter[str]()
    for row, item in items:
        if times[item.custom_id] == 1:
            yield item
            continue
        while (name := sample_name(item.custom_id, samples[item.custom_id])) in times:  # another problem's name
            samples[item.custom_id] += 1
        origin = Origin(row, item.custom_id, sample=samples[item.custom_id])
        samples[item.custom_id] += 1
        yield replace(item, custom_id=name, origin=origin)


class FewshotBenchmark(Benchmark):
    """A benchmark whose questions follow `fewshot` worked examples, the first ones of `fewshot_input`.

    The layout is lm-evaluation-harness's (0.4.x): question, delimiter, answer, and an empty line between examples. In
    chat form, every example is a user and an assistant turn (`fewshot_as_multiturn`), or everything is one user turn.
    """

    options = (*Benchmark.options, "fewshot", "fewshot_input", "fewshot_as_multiturn")
    train: str  # where the examples are if the user names no other source
    usual_fewshot: int
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
        self.examples = read_examples(fewshot_input or self.own_examples(self.source), count, self.example)
        self.prefix = "".join(f"{shot.question}{self.delimiter}{shot.answer}\n\n" for shot in self.examples)
        self.multiturn = fewshot_as_multiturn

    @classmethod
    def own_examples(cls, source: str) -> str:
        """Return the source of the examples if the user names none; `source` has the problems."""
        return cls.train

    @abstractmethod
    def example(self, row: dict[str, Any]) -> Example | None:
        """Return a row as a worked example, or None if it is not set aside for that; raise a BadRow as `item` does."""

    def fewshot_item(self, custom_id: str, question: str, stop: tuple[str, ...], reference: Any) -> Item:
        """Return a question after the examples, in both forms; the job keeps the one that fits the model."""
        plain, messages = self.prefix + question, []
        for example in self.examples if self.multiturn else ():
            messages.append({"role": "user", "content": example.question})
            messages.append({"role": "assistant", "content": example.answer})
        messages.append({"role": "user", "content": question if self.multiturn else plain})
        return Item(custom_id, prompt=plain, messages=messages, prefix=self.prefix, stop=stop, reference=reference)


def text_field(row: dict[str, Any], *names: str) -> str:
    """Return the first of the fields `names` that is a text in `row`; raise a BadRow if none is."""
    for name in names:
        if isinstance(row.get(name), str):
            return str(row[name])
    raise BadRow(f"no text in {' or '.join(names)}")


def read_examples(source: str, count: int, make: Callable[[dict[str, Any]], Example | None]) -> list[Example]:
    """Return the first `count` examples of a source; raise a ValueError if it cannot be read or has fewer."""
    key, examples = "task.fewshot_input", []
    if count:
        for row in rows(source, key):
            try:
                example = None if row.value is None or row.error else make(row.value)
            except BadRow as error:
                raise ValueError(f"{key}={source}: row {row.number}: {error}") from error
            if example is not None:
                examples.append(example)
            if len(examples) == count:
                break
    if len(examples) < count:
        raise ValueError(
            f"{key}={source}: {len(examples)} examples of {count}; lower task.fewshot or name another file"
        )
    return examples
