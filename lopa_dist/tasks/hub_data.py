"""A check before a job begins: whether a task's data sets are in the cache of `datasets` or can be had from the hub."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lopa_dist.hub import why_not_on_hub
from lopa_dist.tasks.registry import options_of, task_class
from lopa_dist.tasks.rows import HUB, hub_parts, is_dataset


def data_sets(task: Any) -> list[str]:
    """Return the ``hf://`` sources that the task with these options reads: its problems and its examples."""
    kind, options = task_class(task.name), options_of(task.name)
    problems = task.input or getattr(kind, "test", None)
    sources = [problems]
    if "fewshot" in options and task.fewshot != 0 and hasattr(kind, "own_examples"):
        sources.append(task.fewshot_input or kind.own_examples(problems))
    return [source for source in dict.fromkeys(sources) if source and is_dataset(source)]


def why_not_there(source: str) -> str:
    """Return why an ``hf://`` source cannot be had here, and what to do; empty if it can."""
    name = hub_parts(source, "task.input")[0]
    if Path(name).expanduser().exists() or cached(name):
        return ""
    remedy = (
        f"where there is a network, run `hf download --repo-type dataset {name} --local-dir DIR`, and read "
        f"task.input={source.replace(HUB + name, HUB + 'DIR')} here"
    )
    return why_not_on_hub("data set", name, remedy)


def cached(name: str) -> bool:
    """Return whether the cache of `datasets` has the data set `name`, prepared before."""
    from huggingface_hub.constants import HF_HOME  # which XDG_CACHE_HOME may move

    place = Path(os.environ.get("HF_DATASETS_CACHE", Path(HF_HOME, "datasets"))).expanduser()
    return (place / name.lower().replace("/", "___")).is_dir()
