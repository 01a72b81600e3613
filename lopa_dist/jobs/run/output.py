"""`task.output`: the results where people keep their data, and on a hub a card that says what they are."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from lopa_dist.checks import UserError
from lopa_dist.config import TaskConfig
from lopa_dist.jobs.show.report import figures
from lopa_dist.jobs.show.run_page import setting_rows
from lopa_dist.jobs.show.table import to_be_written, write_table
from lopa_dist.remote import exists, put

log = logging.getLogger("lopa_dist")
KEY = "task.output"
CARD = "README.md"


def check_output(task: TaskConfig) -> None:
    """Raise a UserError if `task.output` would take the place of the prompts."""
    if task.output and task.input and place_of(task.output) == place_of(task.input):
        raise UserError(
            f"task.output={task.output} is task.input: the results would replace the prompts. Name another file"
        )
    if task.output and task.input and Path(place_of(task.input)) in Path(place_of(task.output)).parents:
        raise UserError(
            f"task.output={task.output} is in the folder task.input: the next job would read it. Name another folder"
        )


def place_of(name: str) -> str:
    """Return what tells files apart: a URL, or a path without links."""
    name = name.removeprefix("file://")
    return name if "://" in name else str(Path(name).expanduser().resolve())


def write_output(folder: Path, report: dict[str, Any]) -> None:
    """Write a complete run's results to `task.output`, if it names a file.

    Raises:
        UserError: it cannot be written; the message says how to write it again.
    """
    out = report["task"].get("output")
    if not out:
        return
    try:
        if out.endswith(".jsonl"):
            with to_be_written(out, KEY) as file:
                shutil.copyfile(folder / "results.jsonl", file)
        else:
            write_table(folder, out, KEY)
        if out.startswith("hf://"):
            write_card(out, report)
    except (ValueError, OSError) as error:
        again = f"lopa-dist table {folder} --out {out}"
        raise UserError(
            f"{error}. The results are in {folder}; {again} writes them there, as .csv or .parquet"
        ) from error
    log.info("results: %s", out)


def write_card(out: str, report: dict[str, Any]) -> None:
    """Put a dataset card into the repository that a file is in, unless there is one."""
    repository = "/".join(out.split("/")[:5])  # hf://datasets/owner/name
    place = f"{repository}/{CARD}"
    if exists(place, KEY):
        return
    with TemporaryDirectory(prefix="lopa_dist-") as folder:
        file = Path(folder, CARD)
        file.write_text(card(out.removeprefix(f"{repository}/"), report), encoding="utf-8")
        put(file, place, KEY)


def card(file: str, report: dict[str, Any]) -> str:
    """A dataset card: the model, its settings and the figures of the run that wrote a file."""
    model, weights = report["model"], report.get("weights", {})
    rows = [(name, text) for name, text in figures(report) if name != "wall time"]
    changed = [
        (key, value)
        for key, value, default, _ in setting_rows(report)
        if key == "seed" or (value != default and key not in (KEY, "task.input"))
    ]
    versions = ", ".join(f"{name} {version}" for name, version in report.get("versions", {}).items())
    head = {"configs": [{"config_name": "default", "data_files": file}], "tags": ["synthetic", "lopa_dist"]}
    front = "\n".join(f"{key}: {json.dumps(value)}" for key, value in head.items())
    return (
        f"---\n{front}\n---\n\n# {PurePosixPath(file).stem}\n\n"
        f"Written by {model['path']} (revision {weights.get('revision', 'unknown')}), a diffusion language model, with "
        f"lopa_dist. One row is an answer to one prompt.\n\n## Settings\n\n{table(changed)}\n"
        f"All others are the defaults of these versions: {versions}.\n\n## Figures\n\n{table(rows)}"
    )


def table(rows: list[tuple[str, str]]) -> str:
    """Pairs as a Markdown table."""
    cells = [(name, text.replace("|", "\\|")) for name, text in rows]
    return "| | |\n|---|---|\n" + "".join(f"| {name} | {text} |\n" for name, text in cells)
