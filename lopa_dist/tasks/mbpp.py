"""MBPP (Austin et al. 2021) and MBPP+ (Liu et al. 2023): write a function from a sentence and three assertions.

Prompt, examples and stop string come from lm-evaluation-harness's `mbpp` and `mbpp_plus`, in chat form, too. Unlike
there, a problem's `test_imports` and `test_setup_code` run before its assertions, MBPP+ is judged by its own tests and
not by the three in the prompt, all assertions of a problem count instead of three, a program has 10 seconds instead of
3, and in chat form only the first fenced block of the answer, if there is one, is run.
"""

from __future__ import annotations

from typing import Any

from lopa_dist.tasks.benchmark import BadRow, Example, FewshotBenchmark, text_field
from lopa_dist.tasks.code_task import CodeTask, first_block, refuse_release_form
from lopa_dist.tasks.rows import HUB
from lopa_dist.tasks.task import Item, Score

STOP = ("[DONE]",)
EXAMPLE_IDS = range(2, 11)  # task ids in MBPP; the first three are the standard examples
TEST_IDS = range(11, 511)


class MBPP(CodeTask, FewshotBenchmark):
    """Problems 11 to 510 after examples 2, 3 and 4; a local file with all of MBPP gives both."""

    name = "mbpp"
    test = "hf://google-research-datasets/mbpp:full:test"
    train = "hf://google-research-datasets/mbpp:full:prompt"
    options = (*FewshotBenchmark.options, *CodeTask.options)
    usual_fewshot = 3
    delimiter = ""

    @classmethod
    def own_examples(cls, source: str) -> str:
        """Return the source of the examples: the hub if the problems come from there, else the file that has these."""
        return cls.train if source.startswith(HUB) else source

    def example(self, row: dict[str, Any]) -> Example | None:
        """Return the row as a worked example; None if it is not one of those set aside for that."""
        if task_number(row) not in EXAMPLE_IDS:
            return None
        return Example(question(text_field(row, "text", "prompt"), row), f"{text_field(row, 'code')}\n[DONE]")

    def item(self, number: int, row: dict[str, Any]) -> Item | None:
        """Return one problem, called `mbpp-TASK_ID`; None if it is not in the test range."""
        task_id = task_number(row)
        if task_id not in TEST_IDS:
            return None
        tests = [*(row.get("test_imports") or []), row.get("test_setup_code") or "", *assertions(row)]
        asked = question(text_field(row, "text", "prompt"), row)
        return self.fewshot_item(f"mbpp-{task_id}", asked, STOP, "\n".join(tests))

    def score(self, item: Item, text: str) -> Score | None:
        """Return whether the function passes the tests."""
        code = text if item.messages is None else first_block(text)
        return self.run(code, item.reference, code)


class MBPPPlus(MBPP):
    """378 of the problems with about 35 times the tests."""

    name = "mbpp_plus"
    test = "hf://evalplus/mbppplus:test"

    @classmethod
    def own_examples(cls, source: str) -> str:
        """Return the source of the examples, which are MBPP's, on the hub."""
        return cls.train

    def item(self, number: int, row: dict[str, Any]) -> Item:
        """Return one problem, called `mbpp-TASK_ID`."""
        refuse_release_form(row)
        tests = "\n".join([*(row.get("test_imports") or []), text_field(row, "test")])
        return self.fewshot_item(
            f"mbpp-{task_number(row)}", question(text_field(row, "prompt", "text"), row), STOP, tests
        )


def task_number(row: dict[str, Any]) -> int:
    """Return the number in ``task_id``; raise a BadRow if there is none."""
    value = row.get("task_id")
    if isinstance(value, bool) or not str(value).isdecimal():
        raise BadRow("no number in task_id")
    return int(str(value))


def assertions(row: dict[str, Any]) -> list[str]:
    """Return ``test_list``; raise a BadRow if it is not a list of texts."""
    tests = row.get("test_list")
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
        raise BadRow("no list of assertions in test_list")
    return tests


def question(text: str, row: dict[str, Any]) -> str:
    """Return what the model is asked: the sentence and the first three assertions."""
    shown = "\n".join(assertions(row)[:3])
    return (
        f"You are an expert Python programmer, and here is your task: {text} Your code should pass these tests:\n\n"
        f"{shown}\n[BEGIN]\n"
    )
