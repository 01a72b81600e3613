"""The list problems of the second embedded model as a task."""

from __future__ import annotations

from collections.abc import Iterable

from lopa_dist.tasks.list_problems import is_right, problems
from lopa_dist.tasks.task import Item, Score
from lopa_dist.tasks.word_problems import Split


class Lists:
    """`limit` different problems of one side of the split, the families in turn."""

    name = "lists"

    def __init__(self, limit: int, split: Split = "held_out", seed: int = 1) -> None:
        self.limit, self.split, self.seed = limit, split, seed

    def items(self) -> Iterable[Item]:
        """Questions as one user message each; the family is a part of the id."""
        seen: set[str] = set()
        for problem in problems(self.split, self.seed):
            if len(seen) == self.limit:
                return
            if problem.question not in seen:
                custom_id = f"lists-{self.split}-{self.seed}-{len(seen)}-{problem.family}"
                seen.add(problem.question)
                messages = [{"role": "user", "content": problem.question}]
                yield Item(custom_id, messages=messages, reference=problem.question)

    def score(self, item: Item, text: str) -> Score:
        """Right when the whole text is a right answer; there may be many."""
        return Score(is_right(item.reference, text), text.strip())
