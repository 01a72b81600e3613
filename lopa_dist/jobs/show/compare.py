"""`lopa-dist report FOLDER`: several runs in one table and one speed-accuracy picture, and as a page."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lopa_dist.atomic import naming
from lopa_dist.encodable import encodable
from lopa_dist.jobs.setup.settings import shown
from lopa_dist.jobs.show.page import Point, Scatter, write_page
from lopa_dist.jobs.show.paired import Paired
from lopa_dist.jobs.show.report import accuracy_interval, judged
from lopa_dist.jobs.show.run_page import command, questions_again, write_run_page
from lopa_dist.jobs.show.seed_groups import (
    SeedGroup,
    differences,
    find_baseline,
    grouped,
    load_reports,
    settings_by_name,
    unfinished,
)

FAILED = "not finished"
SYMBOLS = {"branches": "k", "drafts": "m"}
SPEEDS: list[tuple[str, Callable[[dict[str, Any]], float | None], int]] = [
    ("Tokens per forward", lambda report: report["tpf"], 1),
    ("Rows of the model computed per token", lambda report: report.get("rows_per_token"), -1),
    ("Tokens a second of the job", lambda report: report["tokens_per_s"]["job"], 1),
]
"""What accuracy is drawn against, how a report has it, and -1 where less is faster."""

Cells = dict[str, tuple[str, dict[str, Any]]]
"""A run's row, by the columns of the table: the text of the cell, and the same as columns of `comparison.csv`."""


def compare(folder: Path, console: Console | None = None, baseline: str | None = None) -> None:
    """Print the table; write `comparison.csv`, a page, and `pareto.pdf` if all runs were judged.

    The page is `comparison.html`, or for a single run its `report.html`.

    Args:
        folder: has the runs.
        console: to print on.
        baseline: the run that all others are compared with, by its name or by settings that it alone has.
    """
    groups = grouped(folder, load_reports(folder))
    pairs = [None] * len(groups) if baseline is None else differences(groups, find_baseline(groups, baseline))
    failed = unfinished(folder)
    keys = differing([group.report for group in groups])
    cells = [cells_of(group, pair, keys) for group, pair in zip(groups, pairs, strict=True)]
    file = folder / "comparison.csv"
    with naming(file):
        file.write_text(encodable(csv_text(cells, failed, keys)), encoding="utf-8", newline="")
    head = [name for name in cells[0] if any(row[name][1] for row in cells)]
    names = short_names([group.name for group in groups])
    rows = [[name, *(row[column][0] for column in head[1:])] for name, row in zip(names, cells, strict=True)]
    if by_settings := settings_distinguish(groups):  # then names only repeat settings
        head, rows = head[1:], [row[1:] for row in rows]
    title = ", ".join(sorted({f"{g.report['task']['name']} with {g.report['model']['path']}" for g in groups}))
    console = console or Console()
    print_table(console, title, head, rows, [lost(head, run, keys) for run in failed], groups, keys)
    for name, _ in failed:
        console.print(escape(f"{FAILED}: {folder / name} (cli.log there says more)"))
    curves = curves_of(groups)
    charts = charts_of(groups, head, rows, curves)
    if all("accuracy" in group.report for group in groups):
        from lopa_dist.jobs.show.pareto import draw_pareto  # matplotlib takes a second to import

        complete = [chart for chart in charts if len(chart.points) == len(groups)]
        draw_pareto(folder / "pareto.pdf", complete, list(curves), named_points=not by_settings)
    if len(groups) == 1:
        report = groups[0].report
        page = write_run_page(groups[0].folders[0], report, questions_again(report))
    else:
        page = write_page(
            folder / "comparison.html",
            "comparison.html",
            title=title,
            headline=headline([group.report for group in groups]),
            charts=charts,
            curves=list(curves) if len(curves) > 1 else [],
            along=growing([group.report for group in groups]),
            head=["", *head],
            rows=[[str(number), *row] for number, row in enumerate(rows, 1)],
            commands=commands(folder, groups),
            failed=[name for name, _ in failed],
            baseline=baseline,
        )
    console.print(f"Table and figure: {folder}\nTo pass on: {page}")


def differing(reports: Sequence[dict[str, Any]]) -> list[str]:
    """The settings in which the runs differ."""
    runs = [settings_by_name(report) for report in reports]
    return [k for k in runs[0] if len({json.dumps(settings.get(k)) for settings in runs}) > 1]


def cells_of(group: SeedGroup, pair: Paired | None, keys: Sequence[str]) -> Cells:
    """A point's row.

    Args:
        group: the point.
        pair: compared with a baseline, if there is one.
        keys: the settings in which the points differ.
    """
    report, settings = group.report, settings_by_name(group.report)
    cells: Cells = {"run": (group.name, {"run": group.name})}
    for key in keys:
        text = shown(settings.get(key))
        cells[key] = text, {key: text}
    cells |= dict.fromkeys(("accuracy %", "seeds", "difference", "p"), ("-", {}))
    if "accuracy" in report:
        low, high = accuracy_interval(report)
        numbers = {"accuracy": report["accuracy"], "accuracy_low": low, "accuracy_high": high}
        text = f"{100 * report['accuracy']:.1f} ({100 * low:.1f}-{100 * high:.1f})"
        cells["accuracy %"] = text, numbers | {"judged": judged(report)}
    spread = f", sd {report['accuracy_sd']:.1%}" if "accuracy_sd" in report else ""
    seeds: dict[str, Any] = {key: report[key] for key in ("seeds", "accuracy_sd") if key in report}
    cells["seeds"] = f"{report.get('seeds', 1)}{spread}", seeds
    if pair:
        numbers = {"difference": pair.difference, "difference_low": pair.low, "difference_high": pair.high}
        text = f"{100 * pair.difference:+.1f} ({100 * pair.low:+.1f},{100 * pair.high:+.1f})"
        cells["difference"] = text, numbers | {"better": pair.better, "worse": pair.worse}
        cells["p"] = f"{pair.p:.2g}", {"mcnemar_p": pair.p}
    rows, speed = report.get("rows_per_token"), report["tokens_per_s"]["job"]
    cells["TPF"] = f"{report['tpf']:.2f}", {"tpf": report["tpf"]}
    cells["rows/token"] = f"{rows:.1f}" if rows else "-", {"rows_per_token": rows}
    cells["tokens/s"] = f"{speed:.0f}", {"tokens_per_s": speed}
    cells["requests"] = str(report["requests"]), {"requests": report["requests"], "status": "finished"}
    return cells


def csv_text(cells: Sequence[Cells], failed: Sequence[tuple[str, dict[str, str]]], keys: Sequence[str]) -> str:
    """`comparison.csv`: a row a point, with numbers alone in its cells, for a program that plots."""
    rows = [{name: value for _, numbers in row.values() for name, value in numbers.items()} for row in cells]
    for name, typed in failed:
        known = {key: typed.get(f"decode.{key}", typed.get(key)) for key in keys}
        rows.append({"run": name} | known | {"status": FAILED})
    out = io.StringIO()
    writer = csv.DictWriter(out, dict.fromkeys(name for row in rows for name in row), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def lost(head: Sequence[str], run: tuple[str, dict[str, str]], keys: Sequence[str]) -> list[str]:
    """The row of a run without a report: its name, what was typed, and behind the settings that it is not finished."""
    name, typed = run
    known = {key: typed.get(f"decode.{key}", typed.get(key, "-")) for key in keys}
    results = [column for column in head if column not in ("run", *keys)]
    return [({"run": name, results[0]: FAILED} | known).get(column, "-") for column in head]


def print_table(
    console: Console,
    title: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    lost: Sequence[Sequence[str]],
    groups: Sequence[SeedGroup],
    keys: Sequence[str],
) -> None:
    """Print the columns that fit: a number of requests that all runs have stands in the title."""
    hidden = []
    if len({group.report["requests"] for group in groups}) == 1:
        title += f", {groups[0].report['requests']} requests{' each' if len(groups) > 1 else ''}"
        hidden.append("requests")
    if "run" in head and console.width < 120:  # names that a person gave say more than settings
        hidden += keys
    columns = [i for i, name in enumerate(head) if name not in hidden]
    printed = Table(title=escape(title), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for i in columns:
        name = "rows" if head[i] == "rows/token" and console.width < 100 else head[i]
        printed.add_column(name, justify="left" if head[i] == "run" else "right", overflow="fold")
    for row in (*rows, *lost):
        printed.add_row(*(escape(row[i]) for i in columns))
    console.print(printed)


def settings_distinguish(groups: Sequence[SeedGroup]) -> bool:
    """Whether the runs' settings differ, and their names only repeat them: a name that a person gave says more."""
    settings = {json.dumps(settings_by_name(group.report), sort_keys=True) for group in groups}
    return len(settings) == len(groups) and all("=" in group.name for group in groups)


def short_names(names: Sequence[str]) -> list[str]:
    """Names of a sweep's runs without the settings that all have."""
    common = set.intersection(*(set(name.split(",")) for name in names))
    return [",".join(part for part in name.split(",") if part not in common) or name for name in names]


def growing(reports: Sequence[dict[str, Any]]) -> str | None:
    """The setting that grows along a curve: the branches (the paper's Figure 4), or the number with the most values.

    Only decode settings do, and of equals the first; None where no number differs. A null comes behind all numbers.
    """
    numbers = {}
    for key in differing(reports):
        values = {report["decode"].get(key) for report in reports} - {None}
        if key in reports[0]["decode"] and all(type(value) in (int, float) for value in values):
            numbers[key] = len(values)
    return "branches" if "branches" in numbers else max(numbers, key=numbers.__getitem__, default=None)


def curves_of(groups: Sequence[SeedGroup]) -> dict[str, list[tuple[str, int]]]:
    """Runs by all settings but one, which grows along each curve (`growing`): the label and the index of each."""
    reports = [group.report for group in groups]
    along, by_settings = growing(reports), settings_distinguish(groups)
    others = [key for key in differing(reports) if key != along]
    points = []
    for index, name in enumerate(short_names([group.name for group in groups])):
        settings = settings_by_name(reports[index])
        value = None if along is None else settings[along]
        label = "" if along is None else f"{SYMBOLS.get(along, along)}={shown(value)}"
        curve = ", ".join(f"{key}={shown(settings.get(key))}" for key in others)
        points.append((inf if value is None else value, label if by_settings else name, curve, index))
    curves: dict[str, list[tuple[str, int]]] = {}
    for _, label, curve, index in sorted(points):
        curves.setdefault(curve, []).append((label, index))
    return curves


def charts_of(
    groups: Sequence[SeedGroup],
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    curves: dict[str, list[tuple[str, int]]],
) -> list[Scatter]:
    """Accuracy against each speed, of the points that have both.

    Args:
        groups: the points.
        head, rows: the table, whose rows the points are numbered by and show.
        curves: as `curves_of` returns them.
    """
    places = {index: (label, curve) for curve, runs in enumerate(curves.values()) for label, index in runs}
    charts = []
    for title, speed_of, sign in SPEEDS:
        points = []
        for index, (group, row) in enumerate(zip(groups, rows, strict=True)):
            report, speed = group.report, speed_of(group.report)
            if speed and "accuracy" in report:
                tooltip = ", ".join(f"{name} {cell}" for name, cell in zip(head, row, strict=True))
                low, high = accuracy_interval(report)
                accuracy, name = 100 * report["accuracy"], str(index + 1)
                label, curve = places[index]
                points.append(Point(name, f"{name}. {tooltip}", speed, accuracy, 100 * low, 100 * high, label, curve))
        if points:
            charts.append(Scatter(title, points, sign))
    return charts


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


def commands(folder: Path, groups: Sequence[SeedGroup]) -> list[tuple[str, str]]:
    """The number and folder of each run, and its command; without runs that Hydra did not start."""
    runs = [(number, run, group.report) for number, group in enumerate(groups, 1) for run in group.folders]
    lines = [(f"{number}. {run.relative_to(folder)}", command(run, report)) for number, run, report in runs]
    return [(name, line) for name, line in lines if line]
