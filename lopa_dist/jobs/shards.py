"""`lopa-dist merge FOLDER`: the shards of an array of jobs become one result in input order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lopa_dist.jobs.journal import difference
from lopa_dist.jobs.metrics import mean, ratio
from lopa_dist.jobs.report import read_report, write_report


def merge_shards(folder: Path) -> dict[str, Any]:
    """Join the runs below `folder` into its `results.jsonl` and `report.json`; returns the report.

    Raises:
        ValueError: shards are missing, unfinished, or of different settings; the message names them.
    """
    found = {file.parent: read_report(file) for file in sorted(folder.glob("*/report.json"))}
    reports = {part: report for part, report in found.items() if "shard" in report["task"]}  # not a merged one
    if not reports:
        raise ValueError(f"{folder}: no finished shard (*/report.json) in it; name the folder of an array's runs")
    origin, first = next(iter(reports.items()))
    for part, report in reports.items():
        changes = difference(settings(first), settings(report))
        if changes:
            raise ValueError(f"{part}: other settings than {origin}: {'; '.join(changes)}")
    total = first["task"]["shards"]
    missing = sorted(set(range(total)) - {report["task"]["shard"] for report in reports.values()})
    if missing:
        raise ValueError(f"{folder}: no finished run of shard {', '.join(map(str, missing))} of {total}")
    lines: list[tuple[int, str]] = []
    for part, report in reports.items():
        texts = [line for line in (part / "results.jsonl").read_text(encoding="utf-8").split("\n") if line]
        if len(texts) != report["requests"]:
            raise ValueError(f"{part}: {len(texts)} result lines of {report['requests']}; run it again to finish it")
        lines += [(int(json.loads(line)["index"]), line) for line in texts]
    lines.sort()
    if [index for index, _ in lines] != list(range(len(lines))):
        raise ValueError(f"{folder}: the shards do not make up one input; did it change between their runs?")
    partial = folder / "results.partial"
    with partial.open("w", encoding="utf-8") as out:
        out.writelines(line + "\n" for _, line in lines)
    partial.replace(folder / "results.jsonl")
    report = summed(list(reports.values()))
    write_report(folder, report)
    return report


def settings(report: dict[str, Any]) -> dict[str, Any]:
    """What shards of one job have in common."""
    task = {k: v for k, v in report["task"].items() if k != "shard"}
    engine = {"prefix_cache": report["engine"]["prefix_cache"]}  # the engine's one setting that changes texts
    return {key: report[key] for key in ("decode", "model", "seed")} | {"engine": engine, "task": task}


def summed(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of all shards together; speed is as if they had run side by side."""
    counts = {key: sum(r[key] for r in reports) for key in ("requests", "errors", "completion_tokens", "forwards")}
    accuracies = {}
    for rule in [key for key in reports[0] if key.startswith("accuracy")]:
        judged = [(r[rule], r["requests"] - r["errors"]) for r in reports if rule in r]
        accuracies[rule] = ratio(sum(share * count for share, count in judged), sum(count for _, count in judged))
    seconds = max(r["decode_s"] for r in reports)
    return {
        "schema": 1,
        **counts,
        **accuracies,
        "tpf": ratio(counts["completion_tokens"], counts["forwards"]),
        "tokens_per_s": {
            "mean": mean([r["tokens_per_s"]["mean"] for r in reports]),
            "job": ratio(counts["completion_tokens"], seconds),
        },
        "shards": len(reports),
        **settings(reports[0]),
        "engine": reports[0]["engine"],  # for `lopa-dist trace`
        "decode_s": seconds,
        "wall_s": max(r["wall_s"] for r in reports),
    }
