"""All tasks by name, and the one that a configuration names, which may be the user's own."""

from __future__ import annotations

import inspect
from itertools import islice
from typing import Any

from lopa_dist.own_code import is_own, load
from lopa_dist.remote import is_remote
from lopa_dist.tasks.batch import Batch
from lopa_dist.tasks.embedded import Arithmetic, Lists
from lopa_dist.tasks.gsm8k import GSM8K
from lopa_dist.tasks.harness import HarnessTask
from lopa_dist.tasks.humaneval import HumanEval, HumanEvalPlus
from lopa_dist.tasks.mbpp import MBPP, MBPPPlus
from lopa_dist.tasks.minerva_math import MinervaMath
from lopa_dist.tasks.own_items import checked, named
from lopa_dist.tasks.rows import check, is_dataset
from lopa_dist.tasks.task import Task

KINDS = (Arithmetic, Lists, Batch, GSM8K, MinervaMath, HumanEval, HumanEvalPlus, MBPP, MBPPPlus, HarnessTask)
FIRST = 20  # how many lines of an input are looked at before a job
TASKS: dict[str, Any] = {kind.name: kind for kind in KINDS}
"""The class of each task. Its arguments are `limit` and the keys of `task.*` that its `options` name.

A class may also have `check`, which raises a ValueError for options that this task cannot have, before anything is
read; `check_judging`, which raises one if answers cannot be judged on this machine; `reads_stdin`, whether it takes
``task.input=-``; `of_lines`, whether every item has the line that it was made from (`Origin`), which may be answered in
OpenAI's form; and `draws`, whether the seed may matter to a run whose temperature is 0. Unless a class says otherwise
it may, because items may have temperatures of their own.
"""


def read_later(source: str) -> bool:
    """Return whether `task.input` is on no disk of this machine, so that only the job reads it."""
    return source == "-" or is_dataset(source) or is_remote(source)


def first_errors(task: Task) -> list[str]:
    """Return why each of the first lines of the input cannot be used; an empty text if it can."""
    return [item.error or "" for item in islice(task.items(), FIRST)]


def make_task(options: Any) -> Task:
    """Return the task that the configuration's section `task` names.

    Raises:
        ValueError: a source cannot be read, nothing says whether code may be run, or the user's own class is no task.
    """
    if options.input:
        check(options.input)
    kind = task_class(options.name)
    if unknown := [key for key in options_of(options.name) if not hasattr(options, key)]:
        raise ValueError(
            f"task={options.name}: its `options` name {', '.join(unknown)}, which task.* does not have "
            "(docs/configuration.md#task)"
        )
    given = {"limit": options.limit} | {key: getattr(options, key) for key in options_of(options.name)}
    if not is_own(options.name):
        return kind(**given)
    try:
        inspect.signature(kind).bind(**given)
    except TypeError as error:
        raise ValueError(
            f"task={options.name}: it is made with limit, and with the keys of task.* that its `options` name, "
            f"here {', '.join(given)}, but {error}"
        ) from error
    with named(f"task={options.name}"):
        task: Task = kind(**given)
    items = task.items
    task.items = lambda: islice(checked(items, options.name), options.limit)  # type: ignore[method-assign]
    return task


def make_again(options: Any) -> Task:
    """Return the task of a run that has ended, whose input is read once more.

    Raises:
        ValueError: it was standard input, or cannot be read.
    """
    if options.input == "-":
        raise ValueError("standard input cannot be read again; run a file (task.input=FILE)")
    return make_task(options)


def check_judging(task: Task | type[Task]) -> None:
    """Raise a ValueError if a task, or its class, could not judge answers on this machine, before any is generated.

    Showing what was judged elsewhere needs none of this.
    """
    check = getattr(task, "check_judging", None)
    if check is not None:
        check()


def task_class(name: str) -> Any:
    """Return the class of a task, or the user's own class that ``FILE.py:CLASS`` names.

    Raises:
        ValueError: there is no such class, or it is no task.
    """
    if not is_own(name):
        return TASKS[name]
    kind = load(name, "task")
    missing = [what for what in ("name", "items", "score") if not hasattr(kind, what)]
    if not isinstance(kind, type) or missing:
        lacks = f" and has no {', '.join(missing)}" if missing else ""
        raise ValueError(
            f"task={name}: is a {type(kind).__name__}{lacks}; a task is a class with a name, items() and score() "
            "(docs/inputs.md#a-task-of-your-own)"
        )
    return kind


def options_of(name: str) -> tuple[str, ...]:
    """Return the keys of ``task.*`` that a task takes besides ``limit``."""
    return tuple(getattr(task_class(name), "options", ()))
