"""Read and write the files in benchmarks/results, and print tables on the terminal."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import platform
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.table import Column, Table

RESULTS = Path(__file__).parent / "results"
WIDTH = 150  # columns of a table whose output is not a terminal
Result = dict[str, Any]
Job = TypeVar("Job")


def read(name: str) -> Result:
    """Return the content of the file `name`.json; empty if there is no such file."""
    file = RESULTS / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def write(name: str, content: Result) -> None:
    """Write `content` to the file `name`.json, with each list of numbers on one line."""
    numbers = re.compile(r"\[[\s\d.,e+-]+\]")
    text = numbers.sub(lambda found: re.sub(r"\s+", " ", found[0]), json.dumps(content, indent=1))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(text + "\n")


def machine() -> Result:
    """Return what measured seconds depend on: the processor, the number of cores, and torch's version."""
    name, cores = platform.processor() or platform.machine(), len(os.sched_getaffinity(0))
    return {"machine": name, "cores": cores, "torch": torch.__version__}


def replace_rows(name: str, rows: Iterable[Result], keys: Iterable[str]) -> list[Result]:
    """Write `rows` to a file, in place of older rows with the same values of `keys`; return all rows of the file."""

    def setting(row: Result) -> tuple[Any, ...]:
        return tuple(row.get(key) for key in keys)

    rows, keys = list(rows), list(keys)
    new = {setting(row) for row in rows}
    every = [row for row in read(name).get("rows", []) if setting(row) not in new] + rows
    write(name, machine() | {"rows": every})
    return every


def measured(
    name: str, model: Path, jobs: Mapping[str, Job], work: Callable[[Job], Result], processes: int
) -> dict[str, Result]:
    """Return the results in the file `name`.json by their keys, after running the jobs whose results are missing there.

    Each result is written to the file as soon as it is known. Results of other weights than those in the folder `model`
    are dropped.

    Args:
        name: the file's name.
        model: the checkpoint's folder.
        jobs: the jobs by their keys.
        work: runs a job, in one of the processes, and returns its result.
        processes: how many jobs run at a time.
    """
    weights = hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()[:16]
    content = read(name)
    if content.get("model") != weights:
        content = {"model": weights, "results": {}}
    results: dict[str, Result] = content["results"]
    missing = {key: job for key, job in jobs.items() if key not in results}
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for number, (key, result) in enumerate(zip(missing, pool.imap(work, missing.values()), strict=True), 1):
            results[key] = result
            write(name, content)
            print(f"[{number}/{len(missing)}] {key}", flush=True)
    return results


class Missing:
    """The value of a column that a row does not have; with any format, its text is empty."""

    def __format__(self, form: str) -> str:
        return ""


def show(title: str, rows: Sequence[Result], columns: Mapping[str, str] | None = None) -> None:
    """Print rows as a table.

    Args:
        title: the text above the table.
        rows: the rows, by the names of their values.
        columns: headings, each with the format of its cells: ``{"tokens/s": "{speed:.0f}"}``. A cell whose value a row
            does not have stays empty. None: all values as they are.
    """
    first, *others = columns or rows[0]
    table = Table(Column(first, no_wrap=True), *(Column(name, justify="right") for name in others), title=title)
    for row in rows:
        filled = defaultdict(Missing, row)
        table.add_row(*(form.format_map(filled) for form in columns.values()) if columns else map(str, row.values()))
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)
