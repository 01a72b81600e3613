"""The embedded model's word problems as a task."""

from __future__ import annotations

import re
from collections.abc import Iterable

from lopa_dist.tasks.task import Item, Score
from lopa_dist.tasks.word_problems import Split, problems

ANSWER = re.compile(r"####\s*(-?\d+)")


class Arithmetic:
    """`limit` problems with distinct computations, from one side of the split."""

    name = "arithmetic"

    def __init__(self, limit: int, split: Split = "held_out", seed: int = 1) -> None:
        self.limit, self.split, self.seed = limit, split, seed

    def items(self) -> Iterable[Item]:
        """Questions as one user message each."""
        seen: set[str] = set()
        for problem in problems(self.split, self.seed):
            if len(seen) == self.limit:
                return
            if problem.signature not in seen:
                custom_id = f"arithmetic-{self.split}-{self.seed}-{len(seen)}"
                seen.add(problem.signature)
                messages = [{"role": "user", "content": problem.question}]
                yield Item(custom_id, messages=messages, reference=str(problem.result))

    def score(self, item: Item, text: str) -> Score:
        """Right when the number behind ``####`` is."""
        found = ANSWER.search(text)
        extracted = found.group(1) if found else None
        return Score(extracted == item.reference, extracted)
