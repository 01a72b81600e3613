"""From the configuration's `task` section to the task."""

from __future__ import annotations

from lopa_dist.config import CODE_TASKS, EMBEDDED_TASKS, Config
from lopa_dist.tasks.arithmetic import Arithmetic
from lopa_dist.tasks.batch import Batch
from lopa_dist.tasks.code_task import CodeRunner
from lopa_dist.tasks.gsm8k import GSM8K
from lopa_dist.tasks.harness import HarnessTask
from lopa_dist.tasks.humaneval import HumanEval, HumanEvalPlus
from lopa_dist.tasks.lists import Lists
from lopa_dist.tasks.mbpp import MBPP, MBPPPlus
from lopa_dist.tasks.minerva_math import MinervaMath
from lopa_dist.tasks.rows import check
from lopa_dist.tasks.task import Task


def make_task(config: Config) -> Task:
    """The task that the configuration names.

    Raises:
        ValueError: a source that cannot be read, a library that is not there, code that may not be run.
    """
    task = config.task
    if task.name in EMBEDDED_TASKS:
        assert task.limit is not None  # checked by TaskConfig
        kind = Arithmetic if task.name == "arithmetic" else Lists
        return kind(task.limit, "train" if task.split == "train" else "held_out", task.problem_seed)
    if task.input:
        check(task.input)
    if task.name == "batch":
        assert task.input is not None  # checked by TaskConfig
        return Batch(task.input, task.limit, task.column)
    examples = (task.fewshot, task.fewshot_input, task.fewshot_as_multiturn)
    if task.name == "gsm8k":
        return GSM8K(task.input, task.limit, *examples)
    if task.name == "math":
        return MinervaMath(task.input, task.limit, *examples)
    if task.name == "harness":
        assert task.harness is not None  # checked by TaskConfig
        return HarnessTask(task.harness, task.limit, task.fewshot, task.fewshot_as_multiturn)
    assert task.name in CODE_TASKS
    runner = CodeRunner(task.name, task.allow_code_execution, task.code_timeout_s)
    if task.name == "humaneval":
        return HumanEval(runner, task.input, task.limit)
    if task.name == "humaneval_plus":
        return HumanEvalPlus(runner, task.input, task.limit)
    mbpp = MBPP if task.name == "mbpp" else MBPPPlus
    return mbpp(runner, task.input, task.limit, *examples)
