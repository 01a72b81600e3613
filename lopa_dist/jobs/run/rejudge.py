"""Finished answers are judged again if `task.score`, its file, or the fields of their line have changed since."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from types import SimpleNamespace
from typing import Any

from lopa_dist.jobs.folder.journal import VERDICT_SETTINGS, Journal, Writer, attempt_of
from lopa_dist.jobs.run.job_input import JobInput
from lopa_dist.tasks.task import CannotJudge, Item, Task, is_of_a_verdict, score_of, why_unjudged


def verdict_rule(settings: Mapping[str, Any], item: Item) -> str | None:
    """Return a hash of the rule and of its arguments besides the text; a verdict is valid while the hash is the same.

    Args:
        settings: of the journal.
        item: an item of a task whose rule may change: a batch, or the user's own.
    """
    rule = {key: settings[key] for key in VERDICT_SETTINGS if key in settings}
    if not rule:
        return None
    given = json.dumps([rule, item.metadata], sort_keys=True)
    if item.reference is not None:
        given += json.dumps(item.reference)
    return hashlib.sha256(given.encode()).hexdigest()[:16]


def rejudge(journal: Journal, writer: Callable[[], Writer], job_input: JobInput, task: Task, settings: Any) -> int:
    """Judge all finished answers without a verdict by today's rule; return how many new entries were written.

    Nothing is generated: the texts are in the journal. If the rule still fails, an answer stays without a verdict.

    Args:
        writer: opens the file that takes the new entries.
        settings: the journal's settings as they are today.

    Raises:
        CannotJudge: the rule returns something that is no verdict.
    """
    has_verdict = bytearray(len(job_input))
    for index, entry, _ in journal.entries_of(job_input.ids):
        if index >= 0 and "figures" in entry and "unjudged" not in entry:
            has_verdict[index] |= entry.get("judged_by") == verdict_rule(settings, job_input.items[index])

    def new_entries() -> Iterator[dict[str, Any]]:
        for index, entry, where in journal.entries_of(job_input.ids):
            if index < 0 or "figures" not in entry or has_verdict[index]:
                continue
            has_verdict[index] = 1
            item = job_input.items[index]
            again = with_new_verdict(entry, item, task) | {"judged_by": verdict_rule(settings, item)}
            if again.get("unjudged") and entry.get("unjudged") and again["judged_by"] == entry.get("judged_by"):
                continue  # it fails as before
            yield again | {"attempt": entry.get("attempt", attempt_of(where.part))}

    count, out, entries = 0, None, new_entries()
    while some := list(islice(entries, 256)):
        out = out or writer()
        out.write(*some)
        count += len(some)
    if out:
        out.close()
    return count


def with_new_verdict(entry: dict[str, Any], item: Item, task: Task) -> dict[str, Any]:
    """Return an entry of the journal with the verdict that its text, or its likelihoods, get now."""
    judged = {key: value for key, value in entry.items() if key != "unjudged"}
    line = {key: value for key, value in entry["line"].items() if not is_of_a_verdict(key)}
    likelihoods = [SimpleNamespace(**one) for one in line["likelihoods"]] if "likelihoods" in line else None
    verdict: dict[str, Any] = {"correct": None, "also": {}}
    try:
        if score := score_of(task, item, line["text"], likelihoods):
            verdict = {"correct": score.correct, "also": dict(score.also)}
            line |= score.fields()
    except CannotJudge:
        raise
    except (Exception, SystemExit) as error:  # of the user's code
        judged["unjudged"] = True
        line |= {"correct": None, "unjudged": why_unjudged(error)}
    return judged | {"line": line, "figures": entry["figures"] | verdict}
