"""How far the job in a run folder is, from what it has written; it may be running, or have ended or been killed."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lopa_dist.jobs.folder.attempt_record import AttemptRecord
from lopa_dist.jobs.folder.journal import Journal, attempt_of
from lopa_dist.jobs.folder.one_job import NAME as LOCK
from lopa_dist.jobs.folder.one_job import at_work
from lopa_dist.jobs.folder.part_names import is_missing
from lopa_dist.jobs.show.report import read_report, typed_settings

LOGS = "slurm-*.log"  # links to logs of Slurm jobs, which the batch script makes before the ranks start
LONGEST_WORDS = 500  # the most characters of a log's line
MARKS = (LOCK, "journal/settings.json", "report.json", LOGS)  # files by which a run folder is known


@dataclass(frozen=True)
class RunState:
    """How far a run is.

    Attributes:
        folder: of the run.
        shard: its number, counted from 0, and the number of shards; (0, 1) for a whole input.
        state: complete; running; stopped; "not begun" if a batch script's job has not taken the folder yet; "open" if
            it is not complete and the file system does not say whether it runs.
        expected: number of requests; None where it is not known yet.
        done: finished requests, those with errors included.
        errors: requests that ended with an error.
        invalid: answers that do not have their format.
        tokens_per_s: for a complete run as in its report; else of the last attempt with a journal, since its
            generation began; 0 before it finished anything.
        seconds: of generation, for a complete run as in its report; else of the last attempt with a journal, up to
            its last entry.
        per_s: requests per second that this attempt finished; 0 before the first.
        record: of the last attempt; None where there is none, such as of older versions of lopa_dist.
        unwritten: `task.output` of a complete run if that file is missing; else empty.
        unjudged: answers of a complete run that could not be judged.
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
    unjudged: int = 0

    @property
    def left_s(self) -> float | None:
        """Return the seconds that the open requests will take at the attempt's pace; None without either."""
        return self.open / self.per_s if self.open and self.per_s else None

    @property
    def open(self) -> int | None:
        """Return how many requests are not finished; None where it is not known."""
        return None if self.expected is None else max(0, self.expected - self.done)


def runs_below(folder: Path, damaged: list[str] | None = None) -> list[RunState]:
    """Return the runs in a folder: the folder itself if it is a run's, else those at any depth below it.

    Args:
        folder: the folder.
        damaged: gets a message on each run that is damaged; None: the first one raises an error.

    Raises:
        ValueError: there are none.
    """
    places = {Path(*file.parts[: -len(Path(mark).parts)]) for mark in MARKS for file in folder.rglob(mark)}
    runs = list[RunState]()
    for place in [folder] if is_run(folder) else sorted(places):
        try:
            runs += [state_of(place)] if is_run(place) else []
        except ValueError as error:
            if damaged is None:
                raise
            damaged.append(str(error))
    if not runs and not damaged:
        raise ValueError(f"{folder}: no run in it; name the folder of a run, of an array's runs, or of a sweep")
    shards = {run.folder.parent: run.shard[1] for run in runs if run.shard[1] > 1}
    return [with_shard(run, shards.get(run.folder.parent, 1)) for run in runs]


def with_shard(run: RunState, shards: int) -> RunState:
    """Return the run as one of `shards`, if its folder's name says which and nothing else does yet.

    The batch script makes this folder before the job that says which shard it has.
    """
    number = re.fullmatch(r"shard-(\d+)", run.folder.name)
    return replace(run, shard=(int(number[1]), shards)) if number and run.state == "not begun" else run


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run's; one that shards were merged into is not."""
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
        expected, errors = report.get("expected", expected), report["errors"]
        done = report["requests"] - report.get("open", 0)  # of those that a stopped attempt was to run again
        invalid = report.get("tries", {}).get("invalid", 0)
    complete = bool(report) and done == expected
    if complete and not busy:
        tokens_per_s, seconds = report["tokens_per_s"]["job"], report["decode_s"]
    begun = (folder / LOCK).exists() or journal.folder.is_dir() or bool(report)
    ended = "complete" if complete else "not begun" if not begun else "stopped" if busy is False else "open"
    state = "running" if busy else ended
    output = report["task"].get("output") or "" if complete else ""
    unwritten = output if output and is_missing(output, record.folder if record else "", done) else ""
    counts, unjudged = (expected, done, errors, invalid), report.get("unjudged", 0) if complete else 0
    shard = shard_of(folder, report)
    return RunState(folder, shard, state, *counts, tokens_per_s, seconds, per_s, record, unwritten, unjudged)


def finished_since(journal: Journal, attempt: int) -> tuple[float, float, float, int, int, int]:
    """Return what the attempts from `attempt` on have journaled; the last may still be writing.

    Args:
        journal: of the run.
        attempt: the first one whose requests are counted.

    Returns:
        The last attempt's tokens per second, seconds, and requests per second; then, of all these attempts, the number
        of finished requests, of those with an error, and of those whose answer does not have its format.
    """
    last = journal.next_attempt() - 1
    tokens, seconds, own, done, errors, invalid = 0, 0.0, 0, 0, 0, 0
    for entry, where in journal.entries(min(attempt, last)):
        if "attempt" in entry:
            continue  # a new verdict of an answer that an earlier attempt has finished
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


def last_line(folder: Path) -> str:
    """Return the last line of the newest log that a run wrote itself, which may say why it ended; empty without one."""
    logs = {*folder.glob("*.log")} - {*folder.glob(LOGS)}
    if not logs:
        return ""
    lines = max(logs, key=lambda log: log.stat().st_mtime).read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line[:LONGEST_WORDS] for line in reversed(lines) if line.strip()), "")


def shard_of(folder: Path, report: dict[str, Any]) -> tuple[int, int]:
    """Return which shard of the input a run has, and of how many; (0, 1) for a whole input."""
    settings = folder / "journal" / "settings.json"
    if settings.exists():
        try:
            shard, _, shards = json.loads(settings.read_text(encoding="utf-8")).get("shard", "0 of 1").split()
        except (ValueError, AttributeError) as error:
            remedy = "the job's own command with job.resume=new starts over, and sets aside what there is"
            raise ValueError(f"{settings}: damaged ({error}); {remedy}") from error
        return int(shard), int(shards)
    if report:
        return report["task"].get("shard", 0), report["task"].get("shards", 1)
    given = typed_settings(folder)
    try:
        return int(given.get("task.shard", 0)), int(given.get("task.shards", 1))
    except ValueError:  # such as ${oc.env:SLURM_ARRAY_TASK_ID}, which was known only where the job began
        return 0, 1
