"""A run's report for those who read its input again, perhaps from another folder than the job was started in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lopa_dist.jobs.folder.attempt_record import AttemptRecord
from lopa_dist.jobs.show.report import read_report
from lopa_dist.remote import is_remote
from lopa_dist.tasks.rows import files_of, is_dataset


def report_where_it_began(folder: Path) -> dict[str, Any]:
    """Return a run's report; a relative input is looked for in the folder in which the job was begun, too."""
    report, record = read_report(folder / "report.json"), AttemptRecord.last(folder / "journal")
    source = report["task"]["input"]
    if record and source and not is_remote(source) and not is_dataset(source) and not files_there(source):
        begun = str(Path(record.folder, source))
        if files_there(begun):
            report["task"] |= {"input": begun}
    return report


def files_there(source: str) -> bool:
    """Return whether a local input is there."""
    try:
        files = files_of(source)
        return bool(files) and all(file.exists() for file in files)
    except (ValueError, OSError):
        return False
