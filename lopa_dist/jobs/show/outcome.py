"""What a job says of its results when it is done."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from lopa_dist.checks import UserError
from lopa_dist.jobs.folder.results import ERRORS, kind_of_error, result_lines, results
from lopa_dist.jobs.show.report import with_interval

log = logging.getLogger("lopa_dist")
MOST_KINDS = 5  # of errors that are named


def tell_outcome(report: dict[str, Any], folder: Path) -> float:
    """Log what came out of the job in `folder`, and return its tokens per forward, for sweepers that optimise.

    Raises:
        UserError: no request could run, no answer has the format that was asked for, or none could be judged.
    """
    log.info("%s", headline(report, folder))
    if not report["requests"]:
        shard, shards = report["task"]["shard"], report["task"]["shards"]
        log.info("the input has nothing for task.shard=%d of %d: it is done", shard, shards)
        return 0.0
    if report["errors"]:
        tell_errors(report, folder)
    if invalid := invalid_answers(report):
        first = first_of(folder, "error", "invalid")
        if report["errors"] + invalid == report["requests"]:
            raise UserError(f"no answer has its format; the first: {first}")
        log.info("the first answer without its format: %s", first)
    if report.get("accuracy") == 0 and report["task"].get("score") == "exact":
        log.info(
            "no whole answer equals its reference; task.score=FILE.py:FUNCTION reads answers from texts "
            "(docs/inputs.md#own-problems); with the same hydra.run.dir none is generated again"
        )
    if report.get("unjudged"):
        first = first_of(folder, "unjudged")
        if report["errors"] + report["unjudged"] == report["requests"]:
            raise UserError(f"no answer could be judged; the first: {first}")
        log.info("the first that was not judged: %s", first)
    return float(report["tpf"])


def headline(report: dict[str, Any], folder: Path) -> str:
    """Return a report's figures in a line, and where the results are."""
    parts = [f"{report['requests']} requests"]
    if report["errors"]:
        parts.append(f"{report['errors']} with errors (see errors.jsonl)")
    if invalid := invalid_answers(report):
        parts.append(f"{invalid} without the format asked for (finish_reason invalid)")
    if cut := report.get("cut"):
        parts.append(f"{cut} cut at their limit of tokens")
    if unjudged := report.get("unjudged"):
        parts.append(f"{unjudged} not judged (the same command tries again)")
    figures = [f"accuracy {with_interval(report)}"] if "accuracy" in report else []
    figures += [] if "masks" in report else [f"TPF {report['tpf']:.2f}"]
    figures.append(f"{report['tokens_per_s']['job']:.0f} tokens/s")
    shown = "and report.html are" if (folder / "report.html").exists() else "is"
    return f"{', '.join(parts)}: {', '.join(figures)}; results.jsonl {shown} in {folder}"


def invalid_answers(report: dict[str, Any]) -> int:
    """Return how many answers do not have the format that was asked for."""
    return int(report.get("tries", {}).get("invalid", 0))


def tell_errors(report: dict[str, Any], folder: Path) -> None:
    """Log the first error of each kind, the most frequent kinds first; raise a UserError if no request could run."""
    kinds = errors_by_kind(folder)
    if report["errors"] == report["requests"]:
        first = kinds[0][1] if kinds else f"see {folder / 'results.jsonl'}"
        raise UserError(f"no request could run; the first error: {first}")
    if len(kinds) == 1:
        log.info("the first error: %s", kinds[0][1])
        return
    for count, first in sorted(kinds, reverse=True)[:MOST_KINDS]:
        log.info("%d error%s such as: %s", count, "s" * (count > 1), first)
    if len(kinds) > MOST_KINDS:
        log.info("errors of %d more kinds are in errors.jsonl", len(kinds) - MOST_KINDS)


def errors_by_kind(folder: Path) -> list[tuple[int, str]]:
    """Return for each kind of error in `errors.jsonl` how many there are, and the first of them.

    Errors that differ in numbers or in the place of their line are of one kind.
    """
    kinds: dict[str, list[Any]] = {}
    for _, line in result_lines(folder / ERRORS) if (folder / ERRORS).exists() else ():
        kinds.setdefault(kind_of_error(str(line["error"])), [0, str(line["error"])])[0] += 1
    return [(count, first) for count, first in kinds.values()]


def first_of(folder: Path, key: str, reason: str | None = None) -> str:
    """Return the first message under `key` in `results.jsonl`: why a request could not run, or was not judged.

    With a `reason`, only lines with this `finish_reason` count.
    """
    lines = (line for line in results(folder) if key in line and reason in (None, line["finish_reason"]))
    return str(next((line[key] for line in lines), f"see {folder / 'results.jsonl'}"))
