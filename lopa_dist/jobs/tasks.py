"""From the configuration's `task` section to the task."""

from __future__ import annotations

from lopa_dist.config import Config
from lopa_dist.tasks.registry import TASKS
from lopa_dist.tasks.rows import check
from lopa_dist.tasks.task import Task


def make_task(config: Config) -> Task:
    """The task that the configuration names.

    Raises:
        ValueError: a source that cannot be read, a library that is not there, code that may not be run.
    """
    if config.task.input:
        check(config.task.input)
    kind = TASKS[config.task.name]
    task: Task = kind(limit=config.task.limit, **{key: getattr(config.task, key) for key in kind.options})
    return task
