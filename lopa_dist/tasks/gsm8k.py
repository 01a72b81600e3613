"""GSM8K: grade-school word problems (Cobbe et al. 2021), asked and read as in lm-evaluation-harness's `gsm8k`.

The examples are the first four, as in the LoPA paper's tables; the harness takes five, drawn anew for each problem.
"""

from __future__ import annotations

import re
from typing import Any

from lopa_dist.tasks.benchmark import Example, FewshotBenchmark, text_field
from lopa_dist.tasks.task import Item, Score

STOP = ("Question:", "</s>", "<|im_end|>")
STRICT = re.compile(r"#### (-?[0-9.,]+)")
FLEXIBLE = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")


class GSM8K(FewshotBenchmark):
    """Questions after worked examples.

    `correct` is strict-match, the number after the first ``####``; `flexible` takes the last number of the text.
    """

    name = "gsm8k"
    test = "hf://openai/gsm8k:main:test"
    train = "hf://openai/gsm8k:main:train"
    usual_fewshot = 4

    def example(self, row: dict[str, Any]) -> Example:
        """Return a worked example from a row of the original files, whose `answer` ends in ``#### N``."""
        return Example(f"Question: {text_field(row, 'question')}\nAnswer:", text_field(row, "answer"))

    def item(self, number: int, row: dict[str, Any]) -> Item:
        """Return one problem, called `gsm8k-N` after its row."""
        shown = self.example(row)
        return self.fewshot_item(f"gsm8k-{number}", shown.question, STOP, shown.answer)

    def score(self, item: Item, text: str) -> Score:
        """Return the score of a text: whether each of the two readings equals the reference after normalisation."""
        target = normal(item.reference)
        strict, flexible = STRICT.search(text), FLEXIBLE.findall(text)
        extracted = strict.group(1) if strict else None
        loose = bool(flexible) and normal(flexible[-1]) == target
        return Score(
            extracted is not None and normal(extracted) == target, extracted, {"flexible": loose}, expected=target
        )


def normal(answer: str) -> str:
    """Return an answer as compared: in lower case, without commas, ``$``, final full stop, and text up to ``#### ``."""
    for ignored in (",", r"\$", r"(?s).*#### ", r"\.$"):
        answer = re.sub(ignored, "", answer)
    return answer.lower()
