"""The journal: finished requests, on disk as soon as they finish, from which a stopped or killed job goes on.

`journal/` in the run folder holds one file per replica and attempt, to which lines are appended; a line that a kill cut
short does not count. An id of each request decides what is done, so that a restarted job repeats nothing, runs anew
what has changed in its input, and puts the lines into today's order. `journal/settings.json` holds what the texts
depend on: an attempt with other settings is refused rather than mixed in.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

from lopa_dist.atomic import naming, write_lines
from lopa_dist.decode.config import DecodeConfig, text_settings
from lopa_dist.encodable import json_line
from lopa_dist.jobs.folder.batch_output import LINES, NAME
from lopa_dist.jobs.folder.own_parts import carry_over
from lopa_dist.jobs.folder.packed import RequestIds
from lopa_dist.jobs.folder.results import ERRORS, FIGURES
from lopa_dist.models.files import same_revision
from lopa_dist.parallel.launcher import Start

RESULTS = ("report.json", "report.html", "results.jsonl", ERRORS, FIGURES, NAME, LINES)
FORMAT = 2  # of the entries; a journal in another format lacks figures, and is not continued
ANEW = "give job.resume=new to start over (existing results are set aside)"
REVISIONS = "revision", "lora"  # settings that an earlier version may have written otherwise (`same_revision`)
MAY_CHANGE = ("model.dtype was ", "model.quantization was ")  # if failed requests are run again
# these change no text: if they change, answers are judged again
JUDGED_AGAIN = "the attempt that judged all again"
VERDICT_SETTINGS = ("score", "the source of task.score", "the source of task", JUDGED_AGAIN)
TRIED = "tried"  # key of an entry whose answer lacks its format: how many tries it had; absent if more would not help
PART = re.compile(r"(\d+)-(\d+)\.jsonl")


@dataclass(frozen=True)
class Location:
    """Where a finished request's entry stands."""

    part: Path
    offset: int
    length: int


class Done(NamedTuple):
    """What earlier attempts have finished.

    Attributes:
        flags: by a request's index, 1 if it is finished.
        errors: of these, how many ended with an error.
        invalid: of these, how many answers do not have their format.
        strangers: answers that belong to no request of the input as it is today.
    """

    flags: bytearray
    errors: int
    invalid: int
    strangers: int


class Journal:
    """The journal of one run folder, as rank 0 reads it at the start and at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "journal"

    def open(self, settings: dict[str, Any], resume: str, start: Start, retry: bool = False) -> list[str]:
        """Begin an attempt; return what differs from the first attempt's settings.

        Args:
            settings: what the texts depend on besides the requests.
            resume: ``auto``, or ``new``, which sets earlier attempts and their results aside. A launcher that restarts
                a job repeats its command line; attempts since its first start are then kept. Attempts without a single
                result are set aside, too, if they ran under other settings.
            start: how this attempt was started.
            retry: whether the attempt runs failed requests again, for which numerics may change (`MAY_CHANGE`).

        Raises:
            ValueError: results of earlier attempts were made under other settings, which the message shows; or there
                are files with the names of results, but no attempt that wrote them.
        """
        anew = resume == "new" and self.folder.exists() and not start.again(self.first_start())
        if anew or (not self.has_results() and changed(self.first_settings(), settings)):
            self.set_aside()
        if not self.folder.exists() and (there := [name for name in RESULTS if self.folder.with_name(name).exists()]):
            raise ValueError(
                f"{self.folder.parent} has {', '.join(there)}, but no journal of the job that wrote them: a new "
                "job there would replace them. Give another hydra.run.dir, or move them away"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        if (self.folder / "settings.json").exists():
            return self.changes(settings, retry)
        if self.has_results():
            raise ValueError(
                f"{self.folder} has answers, but no settings.json, which says how they were made. Give job.resume=new "
                "to start over (the old answers are set aside), or another hydra.run.dir"
            )
        for name, content in (("start.json", asdict(start)), ("settings.json", settings)):
            write_lines(self.folder / name, [json.dumps(content, indent=1), "\n"])
        return []

    def set_aside(self) -> None:
        """Move all attempts and their results into a folder beside the journal."""
        old = free_name(self.folder)
        self.folder.rename(old)
        for result in filter(Path.exists, map(self.folder.with_name, RESULTS)):
            result.rename(old / result.name)
        carry_over(old, self.folder)

    def changes(self, settings: dict[str, Any], retry: bool) -> list[str]:
        """Return what differs from the first attempt's settings; raise a ValueError if it may not (see `open`)."""
        earlier = self.first_settings()
        if gone := sorted(earlier.get("decode", {}).keys() - {entry.name for entry in fields(DecodeConfig)}):
            raise ValueError(
                f"{self.folder.parent} has results of a version of lopa_dist that had the settings decode."
                f"{', decode.'.join(gone)}. Finish it with that version, or give job.resume=new to start over (the "
                "old are set aside), or another hydra.run.dir"
            )
        changes = changed(earlier, settings)
        if any(not (retry and change.startswith(MAY_CHANGE)) for change in changes):
            raise ValueError(
                f"{self.folder.parent} has results of other settings: {'; '.join(changes)}. Set them as they were "
                "to continue, or give job.resume=new to set the results aside and start over, or another hydra.run.dir"
            )
        return changes

    def has_results(self) -> bool:
        """Return whether any request has ended."""
        return any("id" in entry for entry, _ in self.entries())

    def first_settings(self) -> dict[str, Any]:
        """Return the first attempt's settings; empty if there was none.

        Earlier versions also wrote settings of decoding that change no text; these are left out.
        """
        file = self.folder / "settings.json"
        settings = read(file) if file.exists() else {}
        return settings | {"decode": text_settings(settings["decode"])} if "decode" in settings else settings

    def retried_from(self, asked: bool, attempt: int, start: Start, what: str = "retry") -> int:
        """Return the first attempt whose failures count; earlier failures are run again. 0: all count.

        With `what` "verdicts", return the same for verdicts: earlier ones are given again.

        Args:
            asked: whether `attempt` should run failed requests again. If its launcher restarts it, the option is given
                again; then only failures before the first of these starts are run again.
            attempt: the number of the attempt that begins.
            start: how it was started.
        """
        file = self.folder / f"{what}.json"
        known: dict[str, Any] = read(file) if file.exists() else {"attempt": 0, "start": {}}
        if asked and not start.again(start_in(file, known["start"])):
            known = {"attempt": attempt, "start": asdict(start)}
            write_lines(file, [json.dumps(known), "\n"])
        return int(known["attempt"])

    def first_start(self) -> Start:
        """Return how the first attempt was started."""
        file = self.folder / "start.json"
        return start_in(file, read(file)) if file.exists() else Start()

    def parts(self) -> list[Path]:
        """Return the files of all attempts and replicas, oldest attempt first."""
        files = [(match, path) for path in self.folder.glob("*.jsonl") if (match := PART.fullmatch(path.name))]
        return [path for _, path in sorted(files, key=lambda pair: (int(pair[0][1]), int(pair[0][2])))]

    def next_attempt(self) -> int:
        """Return the number of an attempt that begins now."""
        return 1 + max((attempt_of(part) for part in self.parts()), default=0)

    def entries(
        self, since: int = 1, read_to: dict[Path, int] | None = None
    ) -> Iterator[tuple[dict[str, Any], Location]]:
        """Yield all complete entries of attempts from `since` on, and where they stand; one cut short is skipped.

        Args:
            since: the first attempt.
            read_to: how far each file was read before; reading goes on from there, and `read_to` is updated.
        """
        for part in self.parts():
            if attempt_of(part) < since:
                continue
            offset = 0 if read_to is None else read_to.get(part, 0)
            with part.open("rb") as lines:
                lines.seek(offset)
                for line in lines:
                    if read_to is not None:
                        if not line.endswith(b"\n"):
                            break  # it is being written
                        read_to[part] = offset + len(line)
                    location = Location(part, offset, len(line))
                    offset += len(line)
                    try:
                        entry = json.loads(line) if line.endswith(b"\n") else None
                    except ValueError:
                        entry = None
                    if isinstance(entry, dict):
                        yield entry, location

    def done(
        self, ids: RequestIds, since: int = 0, unjudged: bool = False, tries: Callable[[int], int] = lambda index: 0
    ) -> Done:
        """Return which requests are finished, according to their entries.

        A request whose answer could not be judged is not: another attempt may be able to judge it. Nor is one that
        failed in an attempt before `since`, or whose answer does not have its format and may now have more tries.

        Args:
            ids: by input index, the request's id.
            since: the attempt from which on errors count.
            unjudged: whether an answer without a verdict counts as finished, because texts are judged again separately.
            tries: by input index, the most answers that a request may have until one has its format.
        """
        done, failed, invalid, strangers = bytearray(len(ids)), set[int](), set[int](), set[str]()
        for index, entry, where in self.entries_of(ids):
            if index < 0 and "figures" in entry:
                strangers.add(entry["id"])
            if index < 0 or ("unjudged" in entry and not unjudged):
                continue
            if TRIED in entry and entry[TRIED] < tries(index):
                continue
            if "figures" in entry:
                if not entry["figures"].get("tries", {}).get("invalid"):
                    invalid.discard(index)
                elif not done[index] or index in failed:
                    invalid.add(index)
                done[index] = 1
                failed.discard(index)
            elif attempt_of(where.part) >= since:
                failed.update(() if done[index] else (index,))
                done[index] = 1
        return Done(done, len(failed), len(invalid), len(strangers))

    def entries_of(
        self, ids: RequestIds, read_to: dict[Path, int] | None = None
    ) -> Iterator[tuple[int, dict[str, Any], Location]]:
        """Yield all complete entries (`entries`), each with the index of its request, or -1, and where it stands."""
        entries = self.entries(read_to=read_to)
        while some := list(islice(entries, 256)):  # ids are found faster together
            indices = ids.find([str(entry.get("id", "")) for entry, _ in some])
            for index, (entry, where) in zip(indices.tolist(), some, strict=True):
                yield index, entry, where


class Writer:
    """The journal's file of one replica and attempt."""

    def __init__(self, folder: Path, attempt: int, replica: int) -> None:
        try:
            self.file = (folder / "journal" / f"{attempt:03d}-{replica}.jsonl").open("x", encoding="utf-8")
        except FileExistsError as error:
            raise ValueError(
                f"{folder}: another job has begun in it at the same moment; wait for that one, or give another "
                "hydra.run.dir"
            ) from error

    def write(self, *entries: dict[str, Any]) -> None:
        """Append entries and make sure that they are on disk, with one sync for all: a sync takes milliseconds."""
        with naming(Path(self.file.name)):
            self.file.writelines(map(json_line, entries))
            self.file.flush()
            os.fsync(self.file.fileno())
            if not self.is_there():
                raise FileNotFoundError(errno.ENOENT, "the run folder was removed or renamed while the job ran")

    def is_there(self) -> bool:
        """Return whether the file still has its name."""
        try:
            return os.path.samestat(os.fstat(self.file.fileno()), os.stat(self.file.name))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def read(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file of the journal; raise a ValueError if it is damaged."""
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file}: damaged ({error}); {ANEW}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: damaged (not a JSON object); {ANEW}")
    return content


def start_in(file: Path, entries: dict[str, Any]) -> Start:
    """Return the start that `file` of the journal has; raise a ValueError if this version does not know its entries."""
    try:
        return Start(**entries)
    except TypeError as error:
        raise ValueError(f"{file}: damaged ({error}); {ANEW}") from error


def changed(earlier: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return what differs between two attempts' settings, except rules of judging; nothing without earlier ones."""
    old, new = (
        {key: value for key, value in settings.items() if key not in VERDICT_SETTINGS} for settings in (earlier, now)
    )
    return difference(old, new) if earlier else []


def attempt_of(part: Path) -> int:
    """Return the attempt's number in a part's name."""
    return int(part.name.split("-")[0])


def difference(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """Return what changed, as ``key was 1, is 2``."""
    changes = []
    for key in sorted(old.keys() | new.keys()):
        was, now = old.get(key), new.get(key)
        if isinstance(was, dict) and isinstance(now, dict):
            changes += difference(was, now, f"{prefix}{key}.")
        elif was != now and not (key in REVISIONS and same_revision(was, now)):
            changes.append(f"{prefix}{key} was {was!r}, is {now!r}")
    return changes


def free_name(folder: Path) -> Path:
    """Return `folder.old`, or the first of `folder.old.2`, `folder.old.3`, ... that is free."""
    names = (folder.with_name(f"{folder.name}.old{f'.{number}' if number > 1 else ''}") for number in count(1))
    return next(name for name in names if not name.exists())
