"""GSM8K: grade-school word problems (Cobbe et al. 2021), prompted and read as lm-evaluation-harness's `gsm8k` does."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from lopa_dist.tasks.fewshot import Example, Prompts, read_examples, read_items, text_field
from lopa_dist.tasks.task import Item, Score

TEST = "hf://openai/gsm8k:main:test"
TRAIN = "hf://openai/gsm8k:main:train"
STOP = ("Question:", "</s>", "<|im_end|>")
STRICT = re.compile(r"#### (-?[0-9.,]+)")
FLEXIBLE = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")


class GSM8K:
    """Questions behind `fewshot` worked examples, the first ones of `fewshot_source`.

    `correct` is strict-match, the number behind the first ``####``; `flexible` takes the last number of the text.
    """

    name = "gsm8k"

    def __init__(
        self,
        source: str | None = None,
        limit: int | None = None,
        fewshot: int | None = None,
        fewshot_source: str | None = None,
        multiturn: bool = True,
    ) -> None:
        self.source, self.limit = source or TEST, limit
        examples = read_examples(fewshot_source or TRAIN, 4 if fewshot is None else fewshot, example)
        self.prompts = Prompts(examples, multiturn=multiturn)

    def items(self) -> Iterable[Item]:
        """One item a problem, called `gsm8k-N` after its row, from 1."""
        return read_items(self.name, self.source, self.limit, self.item)

    def item(self, number: int, row: dict[str, Any]) -> Item:
        """One problem."""
        shown = example(row)
        return self.prompts.item(f"gsm8k-{number}", shown.question, STOP, shown.answer)

    def score(self, item: Item, text: str) -> Score:
        """Exact match after normalisation, of both readings."""
        target = normal(item.reference)
        strict, flexible = STRICT.search(text), FLEXIBLE.findall(text)
        extracted = strict.group(1) if strict else None
        loose = bool(flexible) and normal(flexible[-1]) == target
        return Score(extracted is not None and normal(extracted) == target, extracted, {"flexible": loose})


def example(row: dict[str, Any]) -> Example:
    """A row of the original files: `question`, and `answer` that ends in ``#### N``."""
    return Example(f"Question: {text_field(row, 'question')}\nAnswer:", text_field(row, "answer"))


def normal(answer: str) -> str:
    """What is compared: without commas, dollar signs, all up to ``#### ``, and a last full stop."""
    for ignored in (",", r"\$", r"(?s).*#### ", r"\.$"):
        answer = re.sub(ignored, "", answer)
    return answer.lower()
