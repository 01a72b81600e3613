"""MATH (Hendrycks et al. 2021) with the four examples of Minerva (Lewkowycz et al. 2022), judged by math-verify."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from lopa_dist.optional import why_lacking
from lopa_dist.tasks.benchmark import BadRow, Example, FewshotBenchmark, text_field
from lopa_dist.tasks.task import Item, Score
from lopa_dist.tasks.worker import TooLong, Workers, serve

SUBJECTS = (
    "algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory", "prealgebra",
    "precalculus",
)  # fmt: skip
STOP = ("Problem:",)
WITHIN_S = 60.0  # math-verify gives up two parses and a comparison after 5 s each, if it can be interrupted
BOXED = re.compile(r"\\(?:boxed|fbox)\b")


class MinervaMath(FewshotBenchmark):
    """Problems after the four standard examples.

    The gold answer is what math-verify reads from the whole reference solution, as in lm-evaluation-harness.
    math-verify judges in child processes, which run this file: an answer may keep it busy for seconds, and it limits
    its time with alarms, which need a main thread.
    """

    name = "math"
    usual_fewshot = 4
    test = f"hf://EleutherAI/hendrycks_math:{','.join(SUBJECTS)}:test"
    train = str(Path(__file__).parent / "data" / "minerva_examples.jsonl")

    def __init__(self, *options: Any, **named: Any) -> None:
        self.workers = Workers("lopa_dist.tasks.minerva_math", WITHIN_S)
        super().__init__(*options, **named)

    @staticmethod
    def check_judging() -> None:
        """See `tasks.registry.check_judging`: the library that compares answers must be there."""
        if why := why_lacking("math_verify", name="math-verify"):
            raise ValueError(f"task=math {why}")

    def example(self, row: dict[str, Any]) -> Example:
        """Return a worked example from a row of MATH, with `problem` and `solution`."""
        return Example(f"Problem:\n{text_field(row, 'problem')}\n\nSolution:", text_field(row, "solution"))

    def item(self, number: int, row: dict[str, Any]) -> Item:
        """Return one problem, called `math-N` after its row."""
        shown = self.example(row)
        if not BOXED.search(shown.answer):
            raise BadRow("no \\boxed answer in solution")
        return self.fewshot_item(f"math-{number}", shown.question, STOP, shown.answer)

    def score(self, item: Item, text: str) -> Score:
        """Return whether a text's answer equals the reference as mathematics; it is wrong if math-verify fails on it.

        Raises:
            Lost: the process of math-verify was lost, or could not be started.
        """
        try:
            return Score(**self.workers.ask((item.reference, text)))
        except TooLong as error:
            return Score(False, None, reason=f"math-verify {error}")

    def cancel(self) -> None:
        """End the child processes."""
        self.workers.end()


def judge(question: tuple[str, str]) -> dict[str, Any]:
    """Return the fields of a `Score` for a reference and a text; each of the two is parsed for up to 5 s."""
    from math_verify import parse, verify

    reference, text = question
    try:
        answer, gold = parse(text), parse(reference)
        read = [str(value[-1]) if value else None for value in (answer, gold)]
        return {"correct": bool(verify(gold, answer)), "extracted": read[0], "expected": read[1]}
    except Exception as error:  # sympy's errors have no common base
        return {"correct": False, "extracted": None, "reason": f"math-verify: {type(error).__name__}: {error}"[:200]}


if __name__ == "__main__":
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of every text that it cannot read
    serve(judge)
