"""A run's report for reading its input again, perhaps from another folder than the one that the job began in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lopa_dist.jobs.folder.attempt_record import AttemptRecord
from lopa_dist.jobs.show.report import read_report
from lopa_dist.remote import is_remote
from lopa_dist.tasks.rows import files_of, is_dataset


def report_where_it_began(folder: Path) -> dict[str, Any]:
    """Return a run's report with the files of its task where they are (`task_where_it_began`)."""
    file = folder / "report.json"
    report = read_report(file)
    if "task" not in report:
        raise ValueError(f"{file} is not the report of a job; start its job again, which makes it anew")
    return report | {"task": task_where_it_began(folder, report["task"])}


def task_where_it_began(folder: Path, task: dict[str, Any]) -> dict[str, Any]:
    """Return a report's settings of a task; relative files that are not here are also looked for where the job began.

    These are the input, and own code that is the task or judges.

    Args:
        folder: of the run.
        task: the settings.
    """
    task = dict(task)
    source = task["input"]
    if source and not is_remote(source) and not is_dataset(source) and not files_there(source):
        begun = where_it_began(folder, source)
        if files_there(begun):
            task["input"] = begun
    for key in ("name", "score"):
        file = (task.get(key) or "").rpartition(":")[0]
        if file.endswith(".py") and not Path(file).expanduser().is_file():  # else it is a module's name
            begun = where_it_began(folder, task[key])
            if Path(begun.rpartition(":")[0]).is_file():
                task[key] = begun
    return task


def where_it_began(folder: Path, path: str) -> str:
    """Return where a file of a run's settings is: a relative path begins in the folder that the job was started in."""
    record = record_of(folder)
    if record is None or is_remote(path) or Path(record.folder) == Path.cwd():
        return path
    return str(Path(record.folder, Path(path).expanduser()))


def record_of(folder: Path) -> AttemptRecord | None:
    """Return the record of a run's last attempt, or of one of the shards that were merged into a folder."""
    journals = [folder / "journal", *sorted(folder.glob("*/journal"))]
    return next(filter(None, map(AttemptRecord.last, journals)), None)


def files_there(source: str) -> bool:
    """Return whether all files of a local input exist."""
    try:
        files = files_of(source)
        return bool(files) and all(file.exists() for file in files)
    except (ValueError, OSError):
        return False
