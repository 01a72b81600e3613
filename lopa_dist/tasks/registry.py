"""All tasks by name, and the one that a configuration names, which may be the user's own."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import islice
from typing import Any

from lopa_dist.checks import in_a_line
from lopa_dist.own_code import is_own, load, own_line
from lopa_dist.remote import is_remote
from lopa_dist.tasks.batch import Batch
from lopa_dist.tasks.batch_line import BadLine, integer, read_sampling, read_stop, read_suffix
from lopa_dist.tasks.embedded import Arithmetic, Lists
from lopa_dist.tasks.gsm8k import GSM8K
from lopa_dist.tasks.harness import HarnessTask
from lopa_dist.tasks.humaneval import HumanEval, HumanEvalPlus
from lopa_dist.tasks.mbpp import MBPP, MBPPPlus
from lopa_dist.tasks.minerva_math import MinervaMath
from lopa_dist.tasks.response_format import ResponseFormat
from lopa_dist.tasks.rows import check, is_dataset
from lopa_dist.tasks.task import Continuation, Item, RequestSampling, Task

KINDS = (Arithmetic, Lists, Batch, GSM8K, MinervaMath, HumanEval, HumanEvalPlus, MBPP, MBPPPlus, HarnessTask)
FIRST = 20  # how many lines of an input are looked at before a job
TASKS: dict[str, Any] = {kind.name: kind for kind in KINDS}
"""The class of each task. Its arguments are `limit` and the keys of `task.*` that its `options` name.

A class may also have `check`, which raises a ValueError for options that this task cannot have, before anything is
read; `reads_stdin`, whether it takes ``task.input=-``; `of_lines`, whether every item has the line that it was made
from (`Origin`), which may be answered in OpenAI's form; and `draws`, whether the seed may matter to a run whose
temperature is 0. Unless a class says otherwise it may, because items may have temperatures of their own.
"""


def unusable(task: Any) -> str:
    """Return why none of the first lines of the input can be used; empty if one can, or it is not on this machine."""
    if not task.input or task.input == "-" or is_dataset(task.input) or is_remote(task.input):
        return ""
    errors = [item.error for item in islice(make_task(task).items(), FIRST)]
    return str(errors[0]) if errors and all(errors) else ""


def make_task(options: Any) -> Task:
    """Return the task that the configuration's section `task` names.

    Raises:
        ValueError: a source cannot be read, a library is missing, code may not be run, or the user's own class is not a
            task.
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


@contextmanager
def named(what: str) -> Iterator[None]:
    """Turn an error of the user's own code into a ValueError that says what failed, `what`, and where.

    A ValueError or OSError passes unchanged.
    """
    try:
        yield
    except (ValueError, OSError):
        raise
    except Exception as error:
        raise ValueError(f"{what}: {own_line(error)}{in_a_line(error)}") from error


def checked(items: Callable[[], Iterable[Any]], name: str) -> Iterator[Item]:
    """Yield the items of the user's own task.

    Args:
        items: of the task.
        name: what ``task=`` names.

    Raises:
        ValueError: one cannot be used, which the message shows, or `items` fails.
    """
    with named(f"task={name}: items() failed"):
        for item in items():
            if why := why_unusable(item):
                raise ValueError(f"task={name}: items() gave {item!r}, which {why} (docs/inputs.md#a-task-of-your-own)")
            yield replace(item, stop=tuple(item.stop)) if isinstance(item.stop, list) else item


def why_unusable(item: Any) -> str:
    """Return why an item of the user's own task cannot be used; empty if it can."""
    if not isinstance(item, Item):
        return "is not an Item"
    if not isinstance(item.custom_id, str):
        return "has a custom_id that is not a text"
    if isinstance(item.error, str) and item.error:
        return ""
    if not isinstance(item.prompt, str | None) or not isinstance(item.messages, list | None):
        return "has a prompt that is not a text, or messages that are not a list"
    if item.prompt is None and item.messages is None and not item.error and not item.continuations:
        return "has neither prompt nor messages"
    turns = [turn if isinstance(turn, dict) else {} for turn in item.messages or ()]
    if not all(isinstance(turn.get(key), str) for turn in turns for key in ("role", "content")):
        return "has messages that are not all {'role': TEXT, 'content': TEXT}"
    if not isinstance(item.stop, tuple | list):
        return "has a stop that is not a tuple of texts"
    if not isinstance(item.sampling, RequestSampling):
        return "has a sampling that is not a RequestSampling"
    if not isinstance(item.response_format, ResponseFormat | None):
        return "has a response_format that is not a ResponseFormat"
    if not all(isinstance(one, Continuation) for one in item.continuations):
        return "has continuations that are not all Continuations"
    if not isinstance(item.prefix, str) or not isinstance(item.error, str | None):
        return "has a prefix or an error that is not a text"
    for name, value in (("max_new_tokens", item.max_new_tokens), *asdict(item.sampling).items()):
        if name in ("max_new_tokens", "top_k", "seed") and not (value is None or type(value) is int):
            return f"has {name}={value!r}, which is not an int"
    try:
        integer({"max_new_tokens": item.max_new_tokens}, "max_new_tokens", 1)
        read_stop(list(item.stop))
        read_sampling(asdict(item.sampling))
        read_suffix(item.suffix or "", item.max_new_tokens is not None)
        item.custom_id.encode()
        json.dumps([asdict(item.sampling), item.reference])
        json.dumps(item.metadata, sort_keys=True)
    except BadLine as error:
        return f"cannot be used: {error}"
    except UnicodeEncodeError:
        return "has a custom_id that UTF-8 cannot hold"
    except (TypeError, ValueError) as error:
        return f"has a sampling, metadata or a reference that JSON cannot hold ({error})"
    return ""


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
