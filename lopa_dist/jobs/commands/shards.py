"""`lopa-dist merge FOLDER`: merge the shards of an array of jobs into one result, in input order."""

from __future__ import annotations

import logging
import re
from array import array
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from heapq import merge
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from lopa_dist.atomic import write_lines
from lopa_dist.jobs.commands.status import changes_between, settings, shards_in_words
from lopa_dist.jobs.folder.batch_output import Line, read_batch_lines, write_batch_output
from lopa_dist.jobs.folder.lookahead import drafted_otherwise, lookahead_of
from lopa_dist.jobs.folder.merged import Merged
from lopa_dist.jobs.folder.part_names import in_parts, is_missing
from lopa_dist.jobs.folder.results import AGAIN, FIGURES, Prompts, result_lines, results, write_errors
from lopa_dist.jobs.folder.shard_figures import read_figures
from lopa_dist.jobs.run.output import write_output
from lopa_dist.jobs.show.made_on import made_together
from lopa_dist.jobs.show.metrics import counted, failures
from lopa_dist.jobs.show.report import config_of, read_report, write_report
from lopa_dist.jobs.show.run_state import runs_below
from lopa_dist.jobs.show.where_it_began import where_it_began
from lopa_dist.remote import is_remote
from lopa_dist.tasks.registry import make_task
from lopa_dist.tasks.task import TotallingTask

log = logging.getLogger("lopa_dist")
AT_ONCE = 1.25  # an array whose shards ran at once may take this many times as long as its longest shard
MOST_NAMED = 8  # the most shards named in a line
CLOCK_S = 2.0  # seconds by which clocks of nodes, and starts of an array's jobs, may differ


def merge_shards(folder: Path) -> dict[str, Any]:
    """Merge the shards in `folder` into its `results.jsonl` and `report.json`, and return the report.

    Raises:
        ValueError: `folder` is a run's, or shards are missing, unfinished, there twice, or of different settings or
            inputs. The message names them, and nothing is written.
    """
    if (folder / "journal").is_dir():  # beside it, journal.old has results that were set aside
        raise ValueError(f"{folder}: a single run, which needs no merge; name the folder of an array's runs")
    runs = {file.parent: read_report(file) for file in sorted(folder.glob("*/report.json"))}
    reports = {part: report for part, report in runs.items() if "shard" in report["task"]}  # not a merged one
    if not reports:
        raise ValueError(f"{folder}: no finished shard (*/report.json) in it; name the folder of an array's runs")
    origin, first = next(iter(reports.items()))
    for part, report in reports.items():
        if changes := changes_between(first, report):
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
                f"{part}: of another input than {origin}; it changed between their runs; run the older one again"
            )
        with (part / "results.jsonl").open("rb") as lines:
            count = sum(1 for _ in lines)
        if count != report["requests"]:
            raise ValueError(f"{part}: {count} result lines of {report['requests']}; run it again to finish it")
        if not (part / FIGURES).exists():
            raise ValueError(f"{part}: no {FIGURES}, which earlier versions did not write; {AGAIN}")
    anew = not (folder / "report.json").exists()  # nothing was merged here before
    places = {part: array("q") for part in reports}  # of finished requests, in the whole input
    prompts = Prompts()
    # each shard's lines are in order
    merged_lines = merge(*(numbered(*shard, prompts) for shard in places.items()))
    write_lines(folder / "results.jsonl", (line for _, line in merged_lines))
    errors = sum(report["errors"] for report in reports.values())
    write_errors(folder, errors)
    shards = [parts[shard] for shard in range(total)]
    write_batch_output(folder, lambda: in_turn(shards), first["model"]["path"])
    merged = read_figures((part, np.array(found, dtype=np.int64)) for part, found in places.items())
    report = report_of(list(reports.values()), replace(merged, prompts=prompts), errors)
    if errors:
        report["failures"] = failures(results(folder))
    if any("metrics" in one for one in reports.values()):
        task = make_task(config_of(first).task)
        assert isinstance(task, TotallingTask)
        report["metrics"] = task.totals(results(folder))
    write_report(folder, report)
    if out := report["task"].get("output"):
        place = where_it_began(folder, out)
        if anew and not is_remote(place) and not in_parts(place) and not is_missing(place):
            log.warning("WARNING: task.output=%s was there already; the merged results replace it", place)
        write_output(folder, report | {"task": report["task"] | {"output": place}})
    return report


def numbered(part: Path, finished: array[int], prompts: Prompts) -> Iterator[tuple[int, str]]:
    """Yield a shard's result lines, each with its place in the whole input.

    The places of answers are added to `finished`, and the prompts to `prompts`.
    """
    for text, line in result_lines(part / "results.jsonl"):
        place = int(line["index"])
        if line["finish_reason"] != "error":
            finished.append(place)
        prompts.add(line)
        yield place, text


def in_turn(shards: list[Path]) -> Iterator[Line]:
    """Return the batch lines of all shards, in input order: shard i of n has the requests i, i + n, ..."""
    turns = zip_longest(*map(read_batch_lines, shards))
    return (line for line in chain.from_iterable(turns) if line is not None)


def not_at_once(reports: list[dict[str, Any]]) -> str:
    """Return a warning that shards did not run at the same time, as their common figures assume; empty where they did.

    Of a shard with several attempts, only the times of the last one are known.
    """
    if not all("made" in report for report in reports):
        return ""
    starts = [datetime.fromisoformat(report["made"]["date"]) for report in reports]
    ends = [start + timedelta(seconds=report["wall_s"]) for start, report in zip(starts, reports, strict=True)]
    passed, longest = (max(ends) - min(starts)).total_seconds(), max(report["wall_s"] for report in reports)
    if passed <= AT_ONCE * longest + CLOCK_S:
        return ""
    together = sum(report["decode_s"] for report in reports)
    return (
        f"the {len(reports)} shards did not all run at once: tokens/s and times are as if they had. From the first "
        f"start to the last end {passed:.0f} s passed; generation took {together:.0f} s in all"
    )


def warning_of(said: list[tuple[str, int]]) -> str:
    """Return in one line a warning of several shards; if its numbers differ, it is quoted from the first shard."""
    shards = "shard " + ", ".join(str(shard) for _, shard in said[:MOST_NAMED])
    more = f" and {len(said) - MOST_NAMED} more" * (len(said) > MOST_NAMED)
    if len({warning for warning, _ in said}) == 1:
        return f"{shards}{more}: {said[0][0]}"
    return f"{shards}{more}, each with figures of its own; shard {said[0][1]}: {said[0][0]}"


def report_of(reports: list[dict[str, Any]], merged: Merged, errors: int) -> dict[str, Any]:
    """Return the report of all shards together; speed is as if they ran at once, and a warning says if they did not.

    Args:
        reports: of the shards.
        merged: the requests that they have finished.
        errors: how many requests could not run, or failed.
    """
    first = reports[0]
    decode_s, wall_s = (max(report[key] for report in reports) for key in ("decode_s", "wall_s"))
    report = counted(config_of(first), merged, errors, decode_s, wall_s)
    same = "masks", "whole_input", "whole_prompts", "draws", "chat_template", "weights", "own_code", "parallel"
    kept: dict[str, Any] = {key: first[key] for key in same if key in first}
    said: dict[str, list[tuple[str, int]]] = {}  # by warning without numbers: each shard's warning, and the shard
    for one in reports:
        for warning in one.get("warnings", []):
            said.setdefault(re.sub(r"\d+", "", warning), []).append((warning, one["task"]["shard"]))
    of_shards = [warning_of(shards) for shards in said.values()]
    together = not_at_once(reports)
    codes = {one["made"].get("code", "") for one in reports if "made" in one}
    changed = len(codes) > 1
    others = "the shards were made by different code of lopa_dist: its files changed between them"
    drafted = drafted_otherwise("the shards", [lookahead_of(one["decode"], one["model"]) for one in reports])
    if said or together or changed or drafted:
        kept["warnings"] = [others] * changed + [one for one in (drafted, together) if one] + of_shards
    if all("made" in one for one in reports):
        kept["made"] = made_together([one["made"] for one in reports])
    versions = {name: ", ".join(dict.fromkeys(r["versions"][name] for r in reports)) for name in first["versions"]}
    own = {
        "shards": len(reports),
        "expected": sum(one["expected"] for one in reports),
        "attempts": max(one.get("attempts", 1) for one in reports),  # if several, the time is that of generation
        "versions": versions,
    }
    return report | own | kept | settings(first)
