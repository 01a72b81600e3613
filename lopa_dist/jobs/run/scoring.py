"""Jobs that score texts and generate none: the settings that have no effect there."""

from __future__ import annotations

from collections.abc import Collection

from lopa_dist.config import ParallelConfig
from lopa_dist.tasks.task import LikelihoodTask, Task


def scored_masks(task: Task) -> int:
    """Return how many random masks `task` uses for a text's likelihood; 0 if it generates answers."""
    return task.masks if isinstance(task, LikelihoodTask) and task.scores else 0


def check_scoring(task: Task, parallel: ParallelConfig) -> None:
    """Raise a ValueError if branches are asked for, but texts are scored."""
    if scored_masks(task) and parallel.branch not in ("auto", 1):
        raise ValueError(f"parallel.branch={parallel.branch}: texts are scored without branches; leave it out")


def idle_in_scoring(task: Task, given: Collection[str]) -> list[str]:
    """Return a warning of the typed keys that are about generating, if the task's texts are scored."""
    read = "decode.context", "decode.block_size"
    idle = ["decode=" if key == "decode" else key for key in given if key.split(".")[0] == "decode" and key not in read]
    if not scored_masks(task) or not idle:
        return []
    return [
        f"{', '.join(sorted(idle))}: no effect: this task scores texts and generates none; only "
        "decode.context and decode.block_size say what rows see"
    ]
