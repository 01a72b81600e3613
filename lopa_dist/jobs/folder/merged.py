"""What all entries of a journal say together: `results.jsonl` in input order, and the job's figures."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lopa_dist.atomic import write_lines
from lopa_dist.encodable import json_line
from lopa_dist.engine.work import Work
from lopa_dist.jobs.folder.journal import TRIED, Journal, attempt_of
from lopa_dist.jobs.folder.open_files import mapped_files
from lopa_dist.jobs.folder.packed import Columns, RequestIds
from lopa_dist.jobs.folder.results import Prompts

FAILED, STALE, UNJUDGED, JUDGED = range(4)  # how good a request's entry is; stale: its verdict is by another rule
ENOUGH = float("inf")  # in place of tries, for an answer that no further try replaces
BEST = (ENOUGH, JUDGED)


@dataclass(frozen=True)
class Merged:
    """All entries of a journal together."""

    figures: Columns  # of the finished requests, in input order
    work: Work  # of these requests together
    failed: int  # requests that ended with an error, which have no figures
    unjudged: int  # requests whose answers could not be judged
    replicas: list[dict[str, Any]]  # the entry that each replica wrote at its end
    generated: int | None = None  # tokens of all answers, also of those that others replaced; None: not known
    prompts: Prompts = field(default_factory=Prompts)  # of the result lines


def merge(
    journal: Journal,
    folder: Path,
    ids: RequestIds,
    rejected: Callable[[int], dict[str, Any] | None],
    numbers: Sequence[int],
    carried: Callable[[int], dict[str, Any]] = lambda index: {},
    judged_by: Callable[[int], str | None] = lambda index: None,
) -> Merged:
    """Write `results.jsonl` in input order, atomically, from what is done, and return all entries together.

    The texts stay on disk until their turn comes; memory holds only where they stand.

    Args:
        ids: by input index, the request's id, or None if the item was rejected.
        rejected: by input index, the line of an item that was rejected or set aside; None for others.
        numbers: by input index, the place in the whole input, which becomes the line's `index`.
        carried: by input index, what the line has from today's input.
        judged_by: by input index, the `judged_by` of an entry whose verdict is by today's rule.
    """
    parts = journal.parts()
    part_numbers = {part: n for n, part in enumerate(parts)}
    part_of, offset, length = (array(kind, [0]) * len(ids) for kind in "iqi")
    replicas, weak = [], dict[int, tuple[float, int]]()  # by index: how good an entry is that a better one replaces
    generated = 0
    for index, entry, where in journal.entries_of(ids):
        if "statistics" in entry:
            replicas.append(entry | {"attempt": attempt_of(where.part)})
        if "figures" in entry and "attempt" not in entry:  # entries with an attempt are new verdicts on old answers
            generated += entry["figures"]["tokens"]
        if index < 0:
            continue
        # the first entry counts, unless a later one is better: an answer is better than an error, one with its format
        # better than one without (of these, one with more tries), and one with a verdict better than one without
        kind = FAILED if "figures" not in entry else UNJUDGED if "unjudged" in entry else JUDGED
        if kind == FAILED and rejected(index):
            continue  # it was set aside later, and counts as that
        if kind != FAILED and entry.get("judged_by") != judged_by(index):
            kind = STALE
        good = (-1 if kind == FAILED else entry.get(TRIED, ENOUGH), kind)
        if not length[index] or weak.get(index, BEST) < good:
            weak.pop(index, None)
            if good != BEST:
                weak[index] = good
            part_of[index], offset[index], length[index] = part_numbers[where.part], where.offset, where.length
    figures, work, prompts = Columns(), Work(), Prompts()
    mapped = mapped_files()

    def lines() -> Iterator[str]:
        for index in range(len(ids)):
            if length[index]:
                part = parts[part_of[index]]
                entry = json.loads(mapped(part)[offset[index] : offset[index] + length[index]])
                line = entry["line"]
                if "figures" in entry:
                    work.add(entry["work"])
                    attempt = entry.get("attempt", attempt_of(part))
                    figures.append(entry["figures"] | {"attempt": attempt, "at": entry["at"]})
            elif (line := rejected(index)) is None:
                continue
            made = line_of(line, carried(index), numbers[index])
            prompts.add(made)
            yield json_line(made)

    write_lines(folder / "results.jsonl", lines())
    kinds = [kind for _, kind in weak.values()]
    unjudged, failed = sum(kind in (STALE, UNJUDGED) for kind in kinds), kinds.count(FAILED)
    return Merged(figures, work, failed, unjudged, replicas, generated, prompts)


def line_of(line: dict[str, Any], carried: dict[str, Any], number: int) -> dict[str, Any]:
    """Return a line of `results.jsonl`: the journal's, what is `carried` from the input, and its place there."""
    # the place stands after the name
    return {"custom_id": None, "index": None} | line | carried | {"index": number}
