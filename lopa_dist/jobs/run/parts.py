"""The parts of `task.output`, such as `answers/part-*.parquet`, while a job runs."""

from __future__ import annotations

import json
import logging
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lopa_dist.config import TaskConfig
from lopa_dist.encodable import json_line
from lopa_dist.jobs.folder.journal import Journal, attempt_of
from lopa_dist.jobs.folder.merged import line_of
from lopa_dist.jobs.folder.own_parts import note_parts
from lopa_dist.jobs.folder.part_names import ANSWERS, KEY, part_name
from lopa_dist.jobs.run.job_input import JobInput
from lopa_dist.jobs.show.extra import Extra
from lopa_dist.jobs.show.table import InputAgain, Kinds, input_names, passing_types, rows, to_be_written, write_rows
from lopa_dist.tasks.registry import make_task
from lopa_dist.tasks.rows import signature

log = logging.getLogger("lopa_dist")
EVERY_S = 10.0  # between two looks at the journal
LIMIT_S = 60.0  # to write a part


class Parts:
    """Writes each part of a job's output, in order, as soon as all of its requests have ended, in its own thread.

    It reads the journal of all replicas, so only rank 0 has one. A part's columns are those of its own answers; when
    the job is complete, `write_output` writes all parts anew, with the same columns in each.

    Args:
        task: of the job, which is no shard.
        folder: of the run.
        job_input: the requests.
        journal: of the run folder.
        attempt: the number of the attempt that runs.
        done: 1 for each request that earlier attempts have finished; their entries count only for these.
    """

    def __init__(
        self, task: TaskConfig, folder: Path, job_input: JobInput, journal: Journal, attempt: int, done: bytearray
    ) -> None:
        assert task.output
        self.folder = folder
        self.task, self.out, self.input, self.journal = task, task.output, job_input, journal
        self.attempt, self.done = attempt, done
        self.ended = bytearray(job_input.rejected)
        self.places: list[Path] = []  # files of the journal
        self.part_of, self.offset, self.length = (array(kind, [0]) * len(job_input) for kind in "iqi")
        self.read_to: dict[Path, int] = {}
        self.written = 0  # how many parts are written
        self.known = signature(task.input)
        readable = task.input != "-"
        items = enumerate(make_task(task).items()) if readable else iter(())
        types = passing_types(vars(task)) if readable and self.out.endswith(".parquet") else {}
        self.again = InputAgain(items, task.input, types)
        self.thread = Extra(f"parts of {KEY}={self.out} could not be written before the end of the job", LIMIT_S)
        self.busy, self.next = False, time.monotonic() + EVERY_S

    def __call__(self, *_: object) -> None:
        """Have complete parts written, unless that was just done; return at once."""
        now = time.monotonic()
        if now >= self.next and not self.busy:
            self.busy, self.next = True, now + EVERY_S
            self.thread.post(self.write)

    def close(self, stopped: bool) -> None:
        """End the thread; if the job was `stopped`, write complete parts before that."""
        self.thread.wait(self.write if stopped else lambda: None)
        self.thread.close()

    def write(self) -> None:
        """Write the parts that have become complete."""
        self.read()
        if self.known != (known := signature(self.task.input)):
            log.warning("WARNING: %s: the files have changed; parts from here on have no prompts", self.task.input)
            self.known, self.again = known, InputAgain(iter(()), None, {})
        while (count := min(ANSWERS, len(self.input) - self.written * ANSWERS)) > 0:
            first = self.written * ANSWERS
            if self.ended.find(0, first, first + count) >= 0:
                break
            self.write_part(self.written, list(self.lines(first, first + count)))
            self.written += 1
        self.busy = False

    def read(self) -> None:
        """Read what the journal has got since the last look."""
        entries = self.journal.entries_of(self.input.ids, self.read_to)
        for index, entry, where in entries:
            if index < 0 or (self.length[index] and "figures" not in entry):
                continue  # an answer is worth more than an error
            if self.done[index] or entry.get("attempt", attempt_of(where.part)) == self.attempt:
                self.ended[index] = 1
                if not self.places or self.places[-1] != where.part:
                    self.places.append(where.part)
                self.part_of[index], self.offset[index], self.length[index] = (
                    len(self.places) - 1, where.offset, where.length,
                )  # fmt: skip

    def lines(self, first: int, last: int) -> Iterator[dict[str, Any]]:
        """Yield the result lines of the requests from `first` to before `last`."""
        for index in range(first, last):
            line = self.input.rejection(index)
            if line is None:
                with self.places[self.part_of[index]].open("rb") as file:
                    file.seek(self.offset[index])
                    line = json.loads(file.read(self.length[index]))["line"]
            yield line_of(line, self.input.carried(index), index)

    def write_part(self, number: int, lines: list[dict[str, Any]]) -> None:
        """Write part `number`, which has these result lines."""
        note_parts(self.folder, self.out, number + 1)
        with to_be_written(part_name(self.out, number), KEY) as file:
            if self.out.endswith(".jsonl"):
                file.write_text("".join(map(json_line, lines)), encoding="utf-8")
                return
            kinds, own = Kinds(), dict[str, Any]()
            table_rows = list(rows(lines, self.again, input_names(lines, self.again.types), own))
            for row in table_rows:
                kinds.add(row)
            write_rows(file, Path(self.out).suffix, iter(table_rows), kinds, own)
