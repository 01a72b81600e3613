"""The files in benchmarks/results, and tables on the terminal."""

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
WIDTH = 150  # of a table that no terminal shows
Result = dict[str, Any]
Job = TypeVar("Job")


def read(name: str) -> Result:
    """Return the content of a file; an empty one where there is none."""
    file = RESULTS / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def write(name: str, content: Result) -> None:
    """Write a file, each list of numbers on one line."""
    numbers = re.compile(r"\[[\s\d.,e+-]+\]")
    text = numbers.sub(lambda found: re.sub(r"\s+", " ", found[0]), json.dumps(content, indent=1))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(text + "\n")


def machine() -> Result:
    """Return what seconds depend on."""
    name, cores = platform.processor() or platform.machine(), len(os.sched_getaffinity(0))
    return {"machine": name, "cores": cores, "torch": torch.__version__}


def replace_rows(name: str, rows: Iterable[Result], keys: Iterable[str]) -> list[Result]:
    """Write rows in place of older ones that have the same values of `keys`; return all rows of the file."""

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
    """Return the results of jobs by their keys; only those that the file lacks are measured.

    Each result is in the file as soon as it is there. Results of other weights than the folder `model` has are dropped.
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
    """What a row does not have: nothing is shown, whatever the form."""

    def __format__(self, form: str) -> str:
        return ""


def show(title: str, rows: Sequence[Result], columns: Mapping[str, str] | None = None) -> None:
    """Print rows as a table.

    Args:
        title: above the table.
        rows: of the table.
        columns: headings, and how their cells are formatted: ``{"tokens/s": "{speed:.0f}"}``; what a row does not have
            stays empty. Null: all values as they are.
    """
    first, *others = columns or rows[0]
    table = Table(Column(first, no_wrap=True), *(Column(name, justify="right") for name in others), title=title)
    for row in rows:
        filled = defaultdict(Missing, row)
        table.add_row(*(form.format_map(filled) for form in columns.values()) if columns else map(str, row.values()))
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)
