"""All tasks by name, and the one that a configuration names."""

from __future__ import annotations

from typing import Any

from lopa_dist.tasks.batch import Batch
from lopa_dist.tasks.embedded import Arithmetic, Lists
from lopa_dist.tasks.gsm8k import GSM8K
from lopa_dist.tasks.harness import HarnessTask
from lopa_dist.tasks.humaneval import HumanEval, HumanEvalPlus
from lopa_dist.tasks.mbpp import MBPP, MBPPPlus
from lopa_dist.tasks.minerva_math import MinervaMath
from lopa_dist.tasks.rows import check
from lopa_dist.tasks.task import Task

KINDS = (Arithmetic, Lists, Batch, GSM8K, MinervaMath, HumanEval, HumanEvalPlus, MBPP, MBPPPlus, HarnessTask)
TASKS: dict[str, Any] = {kind.name: kind for kind in KINDS}
"""The class of each task. It is made with `limit` and its own `options`, all by the names of `task.*`."""


def make_task(options: Any) -> Task:
    """The task that the configuration's section `task` names.

    Raises:
        ValueError: a source that cannot be read, a library that is not there, code that may not be run.
    """
    if options.input:
        check(options.input)
    kind = TASKS[options.name]
    task: Task = kind(limit=options.limit, **{key: getattr(options, key) for key in kind.options})
    return task
