"""The embedded model's word problems as a task."""

from __future__ import annotations

import re
from collections.abc import Iterator

from lopa_dist.tasks.problem_task import ProblemTask
from lopa_dist.tasks.task import Item, Score
from lopa_dist.tasks.word_problems import problems

ANSWER = re.compile(r"####\s*(-?\d+)")


class Arithmetic(ProblemTask):
    """Problems with distinct computations."""

    name = "arithmetic"

    def problems(self) -> Iterator[tuple[str, str, str, str]]:
        """The reference is the number alone."""
        for problem in problems(self.split, self.seed):
            yield problem.signature, problem.question, str(problem.result), ""

    def score(self, item: Item, text: str) -> Score:
        """Right when the number behind ``####`` is."""
        found = ANSWER.search(text)
        extracted = found.group(1) if found else None
        return Score(extracted == item.reference, extracted)
