"""The tasks of the models that are in the package: problems from a seeded stream."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from lopa_dist.tasks import list_problems, word_problems
from lopa_dist.tasks.task import Item, Score
from lopa_dist.tasks.word_problems import Split


class EmbeddedTask(ABC):
    """A task of `limit` different problems from one side of the split."""

    name: str
    options: ClassVar[tuple[str, ...]] = ("split", "problem_seed")
    draws = False

    def __init__(self, limit: int, split: Split = "held_out", problem_seed: int = 1) -> None:
        self.limit, self.split, self.seed = limit, split, problem_seed

    @staticmethod
    def check(options: Any) -> None:
        """Raise a ValueError if the section `task` names a file, or no number of problems."""
        if options.input:
            raise ValueError(
                f"task.input={options.input}: the embedded problems are not read from a file; add task=batch"
            )
        if options.limit is None:
            raise ValueError("task.limit: the embedded problems have no end; give a number")

    @abstractmethod
    def problems(self) -> Iterator[tuple[str, str, Any, str]]:
        """Yield for each problem what distinguishes it, its question, its reference and an ending for its id."""

    def items(self) -> Iterable[Item]:
        """Yield an item for each question, as one user message."""
        seen: set[str] = set()
        for key, question, reference, ending in self.problems():
            if len(seen) == self.limit:
                return
            if key not in seen:
                custom_id = f"{self.name}-{self.split}-{self.seed}-{len(seen)}{ending}"
                seen.add(key)
                yield Item(custom_id, messages=[{"role": "user", "content": question}], reference=reference)


class Arithmetic(EmbeddedTask):
    """The word problems, each with a different computation."""

    name = "arithmetic"

    def problems(self) -> Iterator[tuple[str, str, str, str]]:
        """Yield the problems, each with its number alone as reference."""
        for problem in word_problems.problems(self.split, self.seed):
            yield word_problems.signature(problem.steps), problem.question, str(problem.result), ""

    def score(self, item: Item, text: str) -> Score:
        """Return the score of a text, which is right if the number after ``####`` is."""
        number = re.search(r"####\s*(-?\d+)", text)
        extracted = number[1] if number else None
        return Score(extracted == item.reference, extracted, expected=item.reference)


class Lists(EmbeddedTask):
    """The list problems, the families in turn; the family is a part of the id."""

    name = "lists"

    def problems(self) -> Iterator[tuple[str, str, tuple[str, str], str]]:
        """Yield the problems, each with its question and one of perhaps many right answers as reference."""
        for problem in list_problems.problems(self.split, self.seed):
            yield problem.question, problem.question, (problem.question, problem.answer), f"-{problem.family}"

    def score(self, item: Item, text: str) -> Score:
        """Return the score of a text, which is right if the whole text is a right answer."""
        question, answer = item.reference
        return Score(list_problems.is_right(question, text), text.strip(), expected=answer)
