"""What the tasks of the embedded models share: problems of a seeded stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import ClassVar

from lopa_dist.tasks.task import Item
from lopa_dist.tasks.word_problems import Split


class ProblemTask(ABC):
    """`limit` different problems of one side of the split."""

    name: str
    options: ClassVar[tuple[str, ...]] = ("split", "problem_seed")

    def __init__(self, limit: int, split: Split = "held_out", problem_seed: int = 1) -> None:
        self.limit, self.split, self.seed = limit, split, problem_seed

    @abstractmethod
    def problems(self) -> Iterator[tuple[str, str, str, str]]:
        """Yield for each problem what distinguishes it, its question, its reference and an ending for its id."""

    def items(self) -> Iterable[Item]:
        """Questions as one user message each."""
        seen: set[str] = set()
        for key, question, reference, ending in self.problems():
            if len(seen) == self.limit:
                return
            if key not in seen:
                custom_id = f"{self.name}-{self.split}-{self.seed}-{len(seen)}{ending}"
                seen.add(key)
                yield Item(custom_id, messages=[{"role": "user", "content": question}], reference=reference)
