"""How far the job in a run folder is, from what it has written: while it runs, and after it has ended or was killed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lopa_dist.jobs.folder.attempt_record import AttemptRecord
from lopa_dist.jobs.folder.journal import Journal, attempt_of
from lopa_dist.jobs.folder.one_job import NAME as LOCK
from lopa_dist.jobs.folder.one_job import at_work
from lopa_dist.jobs.folder.part_names import is_missing
from lopa_dist.jobs.show.report import read_report, typed_words

LOGS = "slurm-*.log"  # links to the logs of a batch script's jobs, which it makes before the ranks start
MARKS = (LOCK, "journal/settings.json", "report.json", LOGS)  # files of a run folder


@dataclass(frozen=True)
class RunState:
    """How far a run is.

    Attributes:
        folder: of the run.
        shard: its number, from 0 on, and of how many; (0, 1) for a whole input.
        state: complete, running, stopped, "not begun" if a job of a batch script has not taken the folder, or open
            where the file system does not say whether it runs.
        expected: requests; None where none was read yet.
        done: finished requests, those with errors included.
        errors: requests that ended with an error.
        invalid: answers that are not of their format.
        tokens_per_s: of a complete run as in its report; else of the last attempt that finished a request, from the
            beginning of its generation on; 0 before.
        seconds: of generation: of a complete run as in its report; else of the last attempt, up to what finished last.
        per_s: requests that the last attempt finished a second; 0 before.
        record: of the last attempt; None where the version of lopa_dist that ran it wrote none.
        unwritten: `task.output` of a complete run, where that is not there.
    """

    folder: Path
    shard: tuple[int, int]
    state: str
    expected: int | None
    done: int
    errors: int
    invalid: int
    tokens_per_s: float
    seconds: float
    per_s: float
    record: AttemptRecord | None
    unwritten: str = ""

    @property
    def left_s(self) -> float | None:
        """The seconds that the open requests will take, at the pace of the whole attempt; None before the first."""
        return self.open / self.per_s if self.open and self.per_s else None

    @property
    def open(self) -> int | None:
        """Requests that are not finished."""
        return None if self.expected is None else max(0, self.expected - self.done)


def runs_below(folder: Path) -> list[RunState]:
    """Return the runs in a folder: itself, or those at any depth.

    Raises:
        ValueError: there is none.
    """
    places = {Path(*file.parts[: -len(Path(mark).parts)]) for mark in MARKS for file in folder.rglob(mark)}
    runs = [state_of(place) for place in ([folder] if is_run(folder) else sorted(places)) if is_run(place)]
    if not runs:
        raise ValueError(f"{folder}: no run in it; name the folder of a run, of an array's runs, or of a sweep")
    return runs


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run's, and not one that shards were merged into."""
    if any(any(folder.glob(mark)) for mark in MARKS if mark != "report.json"):
        return True
    return (folder / "report.json").exists() and "world" in read_report(folder / "report.json")


def state_of(folder: Path) -> RunState:
    """Return how far the run in a folder is.

    Raises:
        ValueError: its `report.json` or its journal's settings are damaged.
    """
    journal, busy = Journal(folder), at_work(folder)
    report = read_report(folder / "report.json") if (folder / "report.json").exists() else {}
    record = AttemptRecord.last(journal.folder)
    tokens_per_s, seconds, per_s, done, errors, invalid = finished_since(journal, record.number if record else 1)
    expected = record.expected if record else None
    if record:
        done += record.rejected + record.done
        errors += record.rejected + record.errors
        invalid += record.invalid
    # the report of an earlier attempt is not about today's input
    if report and not busy and (record is None or report.get("attempts") == record.number or done == expected):
        expected, done, errors = report.get("expected", expected), report["requests"], report["errors"]
        invalid = report.get("tries", {}).get("invalid", 0)
    complete = bool(report) and done == expected
    if complete and not busy:
        tokens_per_s, seconds = report["tokens_per_s"]["job"], report["decode_s"]
    begun = (folder / LOCK).exists() or journal.folder.is_dir() or bool(report)
    ended = "complete" if complete else "not begun" if not begun else "stopped" if busy is False else "open"
    state = "running" if busy else ended
    output = report["task"].get("output") or "" if complete else ""
    unwritten = output if output and is_missing(output, record.folder if record else "") else ""
    counts = (expected, done, errors, invalid)
    return RunState(folder, shard_of(folder, report), state, *counts, tokens_per_s, seconds, per_s, record, unwritten)


def finished_since(journal: Journal, attempt: int) -> tuple[float, float, float, int, int, int]:
    """Return what the last attempts have journaled, perhaps while one still writes.

    Args:
        journal: of the run.
        attempt: the first one whose requests are counted.

    Returns:
        Of the last one the tokens per second, seconds and requests per second; requests that were finished, how many
        of them with an error, and how many with an answer that is not of its format.
    """
    last = journal.next_attempt() - 1
    tokens, seconds, own, done, errors, invalid = 0, 0.0, 0, 0, 0, 0
    for entry, where in journal.entries(min(attempt, last)):
        number = attempt_of(where.part)
        if "id" in entry and number >= attempt:
            done += 1
            errors += "figures" not in entry
            invalid += entry.get("figures", {}).get("tries", {}).get("invalid", 0)
        if number == last:
            own += "id" in entry
            tokens += entry["figures"]["tokens"] if "figures" in entry else 0
            seconds = max(seconds, entry.get("at", 0.0))
    return (tokens / seconds if seconds else 0.0), seconds, (own / seconds if seconds else 0.0), done, errors, invalid


def shard_of(folder: Path, report: dict[str, Any]) -> tuple[int, int]:
    """Return which share of the input a run has."""
    settings = folder / "journal" / "settings.json"
    if settings.exists():
        try:
            shard, _, shards = json.loads(settings.read_text(encoding="utf-8")).get("shard", "0 of 1").split()
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{settings}: damaged ({error})") from error
        return int(shard), int(shards)
    if report:
        return report["task"].get("shard", 0), report["task"].get("shards", 1)
    given = dict(word.partition("=")[::2] for word in typed_words(folder))
    return int(given.get("task.shard", 0)), int(given.get("task.shards", 1))
