"""`lopa-dist merge FOLDER`: the shards of an array of jobs become one result in input order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from heapq import merge
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from lopa_dist.atomic import write_lines
from lopa_dist.jobs.commands.status import shards_in_words
from lopa_dist.jobs.folder.batch_output import Line, read_batch_lines, write_batch_output
from lopa_dist.jobs.folder.journal import difference
from lopa_dist.jobs.folder.results import result_lines, results, write_errors
from lopa_dist.jobs.run.output import write_output
from lopa_dist.jobs.show.metrics import mean, ratio, wilson
from lopa_dist.jobs.show.report import config_of, is_rule, judged, read_report, write_report
from lopa_dist.jobs.show.run_state import runs_below
from lopa_dist.tasks.registry import make_task
from lopa_dist.tasks.task import TotallingTask


def merge_shards(folder: Path) -> dict[str, Any]:
    """Join the runs below `folder` into its `results.jsonl` and `report.json`; returns the report.

    Raises:
        ValueError: `folder` is a run's, or shards are missing, unfinished, there twice, or of different settings or
            inputs; the message names them, and nothing was written.
    """
    if (folder / "journal").is_dir():  # beside it, journal.old has results that were set aside
        raise ValueError(f"{folder}: a run of its own, whose results are whole; name the folder of an array's runs")
    runs = {file.parent: read_report(file) for file in sorted(folder.glob("*/report.json"))}
    reports = {part: report for part, report in runs.items() if "shard" in report["task"]}  # not a merged one
    if not reports:
        raise ValueError(f"{folder}: no finished shard (*/report.json) in it; name the folder of an array's runs")
    origin, first = next(iter(reports.items()))
    for part, report in reports.items():
        if changes := difference(settings(first), settings(report)):
            raise ValueError(f"{part}: other settings than {origin}: {'; '.join(changes)}")
    total = first["task"]["shards"]
    parts: dict[int, Path] = {}
    for part, report in reports.items():
        shard = report["task"]["shard"]
        if shard in parts:
            raise ValueError(f"shard {shard} is in both {parts[shard]} and {part}: remove one of them")
        parts[shard] = part
    if len(parts) < total or any(report["requests"] < report["expected"] for report in reports.values()):
        raise ValueError(f"{folder}: {'; '.join(shards_in_words(runs_below(folder)))}")
    for part, report in reports.items():
        if report["whole_input"] != first["whole_input"]:
            raise ValueError(
                f"{part}: of another input than {origin}; it changed between their runs, run the older again"
            )
        with (part / "results.jsonl").open("rb") as lines:
            count = sum(1 for _ in lines)
        if count != report["requests"]:
            raise ValueError(f"{part}: {count} result lines of {report['requests']}; run it again to finish it")
    # each shard has its lines in order
    write_lines(folder / "results.jsonl", (line for _, line in merge(*map(numbered, reports))))
    write_errors(folder, sum(report["errors"] for report in reports.values()))
    shards = [parts[shard] for shard in range(total)]
    write_batch_output(folder, lambda: in_turn(shards), first["model"]["path"])
    report = summed(list(reports.values()))
    if any("metrics" in one for one in reports.values()):
        task = make_task(config_of(first).task)
        assert isinstance(task, TotallingTask)
        report["metrics"] = task.totals(results(folder))
    write_report(folder, report)
    write_output(folder, report)
    return report


def numbered(part: Path) -> Iterator[tuple[int, str]]:
    """A shard's result lines, each with its place in the whole input."""
    yield from ((int(line["index"]), text) for text, line in result_lines(part / "results.jsonl"))


def in_turn(shards: list[Path]) -> Iterator[Line]:
    """The input lines of all shards' requests, in input order: shard i of n has the requests i, i + n, ..."""
    turns = zip_longest(*map(read_batch_lines, shards))
    return (line for line in chain.from_iterable(turns) if line is not None)


def settings(report: dict[str, Any]) -> dict[str, Any]:
    """What shards of one job have in common."""
    task = {k: v for k, v in report["task"].items() if k != "shard"}
    # at one path there may be other weights, and dtype=auto means another precision on another device
    return {key: report.get(key) for key in ("decode", "model", "weights", "seed")} | {"task": task}


def summed(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of all shards together; speed is as if they had run side by side."""
    first, seconds = reports[0], max(r["decode_s"] for r in reports)
    total = {key: sum(r[key] for r in reports) for key in ("requests", "errors", "completion_tokens", "forwards")}
    rows, tries = sum(r.get("rows", 0) for r in reports), Counter[str]()
    for report in reports:
        tries.update(report.get("tries", {}))
    merged: dict[str, Any] = {"schema": 1, **total}
    if tries:
        merged["tries"] = dict(tries)
    if "masks" in first:
        merged["masks"] = first["masks"]
    if unjudged := sum(r.get("unjudged", 0) for r in reports):
        merged["unjudged"] = unjudged
    for rule in sorted({key for report in reports for key in report if key == "accuracy" or is_rule(key)}):
        shares = [(r[rule], judged(r)) for r in reports if rule in r]
        merged[rule] = ratio(sum(share * count for share, count in shares), sum(count for _, count in shares))
    if "accuracy" in merged:
        merged["judged"] = sum(judged(r) for r in reports if "accuracy" in r)
        merged["accuracy_95"] = [*wilson(merged["accuracy"], merged["judged"])]
    return merged | {
        "tpf": ratio(total["completion_tokens"], total["forwards"]),
        "rows": rows,
        "rows_per_token": ratio(rows, total["completion_tokens"]),
        "tokens_per_s": {
            "mean": mean([r["tokens_per_s"]["mean"] for r in reports]),
            "job": ratio(total["completion_tokens"], seconds),
        },
        "shards": len(reports),
        **settings(first),
        "engine": first["engine"],  # for `lopa-dist trace`
        "decode_s": seconds,
        "wall_s": max(r["wall_s"] for r in reports),
    }
