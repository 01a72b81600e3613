"""The list problems of the second embedded model as a task."""

from __future__ import annotations

from collections.abc import Iterator

from lopa_dist.tasks.list_problems import is_right, problems
from lopa_dist.tasks.problem_task import ProblemTask
from lopa_dist.tasks.task import Item, Score


class Lists(ProblemTask):
    """Different problems, the families in turn; the family is a part of the id."""

    name = "lists"

    def problems(self) -> Iterator[tuple[str, str, str, str]]:
        """The question itself is what an answer is held against: there may be many right ones."""
        for problem in problems(self.split, self.seed):
            yield problem.question, problem.question, problem.question, f"-{problem.family}"

    def score(self, item: Item, text: str) -> Score:
        """Right when the whole text is a right answer."""
        return Score(is_right(item.reference, text), text.strip())
