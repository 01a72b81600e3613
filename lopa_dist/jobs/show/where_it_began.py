"""A run's report for reading its input again, perhaps from another folder than the one that the job began in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lopa_dist.jobs.folder.attempt_record import AttemptRecord
from lopa_dist.jobs.show.report import read_report
from lopa_dist.remote import is_remote
from lopa_dist.tasks.rows import files_of, is_dataset


def report_where_it_began(folder: Path) -> dict[str, Any]:
    """Return a run's report; a relative input that is not here is also looked for in the folder the job began in."""
    report, record = read_report(folder / "report.json"), AttemptRecord.last(folder / "journal")
    source = report["task"]["input"]
    if record and source and not is_remote(source) and not is_dataset(source) and not files_there(source):
        begun = str(Path(record.folder, source))
        if files_there(begun):
            report["task"] |= {"input": begun}
    return report


def files_there(source: str) -> bool:
    """Return whether all files of a local input exist."""
    try:
        files = files_of(source)
        return bool(files) and all(file.exists() for file in files)
    except (ValueError, OSError):
        return False
