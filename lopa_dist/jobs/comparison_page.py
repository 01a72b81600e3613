"""Several runs as a page, `comparison.html`: charts of accuracy against speed, a table, and the commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lopa_dist.jobs.charts import Point, Scatter
from lopa_dist.jobs.page import write_page
from lopa_dist.jobs.report import accuracy_interval
from lopa_dist.jobs.run_page import command

NAME = "comparison.html"


def write_comparison_page(
    folder: Path, title: str, named: Sequence[tuple[str, dict[str, Any]]], head: list[str], rows: list[list[str]]
) -> Path:
    """Write the page; returns the file.

    Args:
        folder: of the runs.
        title: what they have in common.
        named: the reports with the names of their folders.
        head, rows: a table of the runs, in the same order.
    """
    tooltips = [
        f"{number}. " + ", ".join(f"{name} {cell}" for name, cell in zip(head, row, strict=True))
        for number, row in enumerate(rows, 1)
    ]
    commands = [(f"{i}. {name}", command(folder / name, report)) for i, (name, report) in enumerate(named, 1)]
    return write_page(
        folder / NAME,
        "comparison.html",
        title=title,
        headline=headline([report for _, report in named]),
        charts=list(charts([report for _, report in named], tooltips)),
        head=["", *head],
        rows=[[str(number), *row] for number, row in enumerate(rows, 1)],
        commands=[(name, line) for name, line in commands if line],
    )


def headline(reports: Sequence[dict[str, Any]]) -> str:
    """What came out, in words; runs are called by their numbers."""
    words = f"{len(reports)} runs, in the order of tokens per forward pass."
    judged = [(r["accuracy"], r["tpf"], number) for number, r in enumerate(reports, 1) if "accuracy" in r]
    if judged:
        for which, (accuracy, tpf, number) in (
            ("The most accurate is", max(judged)),
            ("The most tokens per forward pass has", max(judged, key=lambda run: run[1])),
        ):
            words += f" {which} number {number}: {accuracy:.1%} at {tpf:.2f}."
    return words


SPEEDS: list[tuple[str, Callable[[dict[str, Any]], float | None], int]] = [
    ("Tokens per forward", lambda report: report["tpf"], 1),
    ("Rows of the model computed per token", lambda report: report.get("rows_per_token"), -1),
    ("Tokens a second of the job", lambda report: report["tokens_per_s"]["job"], 1),
]


def charts(reports: Sequence[dict[str, Any]], tooltips: Sequence[str]) -> Iterator[Scatter]:
    """Accuracy against each speed, of the runs that have both."""
    for title, speed_of, sign in SPEEDS:
        points = []
        for number, (report, tooltip) in enumerate(zip(reports, tooltips, strict=True), 1):
            speed = speed_of(report)
            if speed and "accuracy" in report:
                low, high = accuracy_interval(report)
                points.append(Point(str(number), tooltip, speed, 100 * report["accuracy"], 100 * low, 100 * high))
        if points:
            yield Scatter(title, points, sign)
