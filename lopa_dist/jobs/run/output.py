"""`task.output`: the results, written to where users keep their data."""

from __future__ import annotations

import logging
import shlex
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

from lopa_dist.checks import UserError
from lopa_dist.config import TaskConfig
from lopa_dist.jobs.folder.open_files import lines_of
from lopa_dist.jobs.folder.own_parts import keep_parts, note_parts, parts_written
from lopa_dist.jobs.folder.part_names import KEY, in_parts, is_missing, parts_of, parts_there
from lopa_dist.jobs.show.table import mixed_types, to_be_written, write_table
from lopa_dist.remote import is_remote

log = logging.getLogger("lopa_dist")


def warnings_of(task: TaskConfig, begins: bool) -> list[str]:
    """Return warnings about a job's output before the job runs; with `begins`, nothing of the job is done yet."""
    out = task.output or ""
    types = mixed_types(task.input) if out.endswith(".parquet") else []
    said = [f"task.input: {sentence}" for sentence in types]
    if begins and out and not is_remote(out) and not in_parts(out) and not is_missing(out):
        said.append(f"{KEY}={out} is there already: when the job is complete, its results replace it")
    return said


def check_parts(folder: Path, out: str, answers: int, begins: bool) -> None:
    """Raise a UserError if there are parts of another job: they would be replaced, or read together with this job's.

    A run with a journal knows which parts it has written on this machine. Otherwise, once the job has begun, parts
    count as its own if their numbers are among those of its own parts.

    Args:
        folder: of the run.
        out: the pattern of the parts.
        answers: of the job.
        begins: whether nothing of the job is done yet.
    """
    most, own = len(parts_of(out, answers)), parts_written(folder, out)
    known = begins or (not is_remote(out) and (folder / "journal").is_dir())
    foreign = [name for number, name in parts_there(out, KEY).items() if number >= own and (known or number >= most)]
    if foreign:
        names = f"{foreign[0]} to {foreign[-1]}" if len(foreign) > 1 else foreign[0]
        raise UserError(f"{KEY}={out}: there are parts of another job ({names}); remove them, or name another folder")


def write_output(folder: Path, report: dict[str, Any]) -> None:
    """Write a complete run's results to `task.output`, if it names a file.

    Raises:
        UserError: it cannot be written; the message says how to write it again.
    """
    out = report["task"].get("output")
    if not out:
        return
    parts = parts_of(out, report["requests"]) if in_parts(out) else []
    try:
        if parts:
            check_parts(folder, out, report["requests"], begins=False)
            note_parts(folder, out, len(parts))
        if out.endswith(".jsonl") and parts:
            lines = lines_of(folder / "results.jsonl")
            for name, most in parts:
                with to_be_written(name, KEY) as file, file.open("w", encoding="utf-8") as part:
                    part.writelines(islice(lines, most))
        elif out.endswith(".jsonl"):
            with to_be_written(out, KEY) as file:
                shutil.copyfile(folder / "results.jsonl", file)
        else:
            _, _, missing = write_table(folder, out, KEY)
            if missing:
                log.warning(
                    "WARNING: %s is written %s. If the input is restored, this command writes it with prompts: %s",
                    out, missing.strip(), shlex.join(["lopa-dist", "table", str(folder), "--out", out]),
                )  # fmt: skip
        if parts:  # there may be more, of an input that was longer
            keep_parts(folder, out, len(parts))
    except (ValueError, OSError) as error:
        raise UserError(f"{error}. The results are in {folder}; the same command again writes them there") from error
    log.info("results: %s", out)
