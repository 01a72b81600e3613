"""HumanEval (Chen et al. 2021) and HumanEval+ (Liu et al. 2023): complete a function from its docstring.

The plain form is the prompt itself, as in lm-evaluation-harness's `humaneval`. The chat form is that of its
`humaneval_instruct`: the assistant's turn begins with a code block that holds the prompt, and what follows the end of
the block is not judged.
"""

from __future__ import annotations

from typing import Any

from lopa_dist.tasks.benchmark import Benchmark, text_field
from lopa_dist.tasks.code_task import CodeTask, refuse_release_form
from lopa_dist.tasks.task import Item, Score

STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
REQUEST = (
    "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{prompt}\n```\n"
)
BEGINNING = "Here is the completed function:\n```python\n{prompt}\n"


class HumanEval(CodeTask, Benchmark):
    """A benchmark without examples; an item's reference is the prompt and the tests."""

    name = "humaneval"
    test = "hf://openai/openai_humaneval:test"
    options = (*Benchmark.options, *CodeTask.options)

    def item(self, number: int, row: dict[str, Any]) -> Item:
        """Return one problem, under the benchmark's own id (``HumanEval/0``)."""
        refuse_release_form(row)
        prompt, name, tests = (text_field(row, key) for key in ("prompt", "entry_point", "test"))
        return Item(
            text_field(row, "task_id"),
            prompt=prompt,
            messages=[{"role": "user", "content": REQUEST.format(prompt=prompt)}],
            answer_prefix=BEGINNING.format(prompt=prompt),
            stop=STOP,
            reference=(prompt, f"{tests}\ncheck({name})\n"),
        )

    def score(self, item: Item, text: str) -> Score | None:
        """Return whether prompt and completion pass the tests."""
        prompt, tests = item.reference
        code = text if item.messages is None else text.split("```", 1)[0]  # to the end of the block that we opened
        return self.run(prompt + code, tests, code)


class HumanEvalPlus(HumanEval):
    """The same prompts with about 80 times the tests."""

    name = "humaneval_plus"
    test = "hf://evalplus/humanevalplus:test"
