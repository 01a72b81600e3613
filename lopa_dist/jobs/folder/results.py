"""`results.jsonl` and `errors.jsonl`: a line for each request, in input order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lopa_dist.atomic import write_lines
from lopa_dist.jobs.folder.open_files import lines_of

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


def write_errors(folder: Path, count: int) -> None:
    """Write the result lines of the `count` requests that could not run into `errors.jsonl`; no file if all could."""
    (folder / ERRORS).unlink(missing_ok=True)
    if not count:
        return
    failed = (text for text, line in result_lines(folder / "results.jsonl") if line["finish_reason"] == "error")
    write_lines(folder / ERRORS, failed)
