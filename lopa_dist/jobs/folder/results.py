"""`results.jsonl` and `errors.jsonl`: a line for each request, in input order."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lopa_dist.atomic import write_lines
from lopa_dist.jobs.folder.open_files import lines_of
from lopa_dist.tasks.names import without_sample

ERRORS = "errors.jsonl"
FIGURES = "figures.npz"  # of a shard (`shard_figures`)
AGAIN = "start its job again with this run folder, which writes the file anew"


def result_lines(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the lines of a `results.jsonl`, each as text and parsed.

    Raises:
        ValueError: a line is damaged.
    """
    for number, text in enumerate(lines_of(file), 1):
        try:
            line = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{file}, line {number}: damaged ({error}); {AGAIN}") from error
        if not isinstance(line, dict) or not {"custom_id", "index", "finish_reason"} <= line.keys():
            raise ValueError(f"{file}, line {number}: no result of a job; {AGAIN}")
        yield text, line


def results(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a run's `results.jsonl`, as `result_lines` reads them; none if only the report was kept."""
    if (folder / "results.jsonl").exists():
        yield from (line for _, line in result_lines(folder / "results.jsonl"))


def kind_of_error(text: str) -> str:
    """Return an error without its line and file, and with N for all other numbers, so that similar ones are alike."""
    return re.sub(r"\d+", "N", re.sub(r"^line \d+( \(.*?, line \d+\))?: ", "", text))


def prompt_of(line: Mapping[str, Any]) -> str:
    """Return the name of the prompt that a result line answers: its samples have it in common."""
    name = str(line["custom_id"])
    return without_sample(name, line["sample"]) if "sample" in line else name


class PromptCount:
    """Counts the prompts that result lines answer; it stores the names of only those that have several samples."""

    def __init__(self) -> None:
        self.alone, self.sampled = 0, set[str]()

    def add(self, line: Mapping[str, Any]) -> None:
        """Count the prompt of a line, unless another sample of it was counted."""
        if "sample" in line:
            self.sampled.add(prompt_of(line))
        else:
            self.alone += 1

    def __len__(self) -> int:
        return self.alone + len(self.sampled)


class Prompts:
    """Counts of prompts: all, and those with an answer that was judged, which are problems."""

    def __init__(self) -> None:
        self.all, self.judged = PromptCount(), PromptCount()

    def add(self, line: Mapping[str, Any]) -> None:
        """Count the prompt of a line."""
        self.all.add(line)
        if line.get("correct") is not None:
            self.judged.add(line)


def write_errors(folder: Path, count: int) -> None:
    """Write into `errors.jsonl` the result lines of the `count` requests that could not run; no file if all could."""
    (folder / ERRORS).unlink(missing_ok=True)
    if not count:
        return
    failed = (text for text, line in result_lines(folder / "results.jsonl") if line["finish_reason"] == "error")
    write_lines(folder / ERRORS, failed)
