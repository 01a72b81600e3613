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
    comparison, console = Comparison(folder, baseline), console or Console()
    file = folder / "comparison.csv"
    with naming(file):
        file.write_text(encodable(comparison.csv_text()), encoding="utf-8", newline="")
    comparison.print_table(console)
    for name, _ in comparison.failed:
        console.print(escape(f"{FAILED}: {folder / name} (cli.log there says more)"))
    comparison.draw()
    groups = comparison.groups
    if len(groups) == 1:
        page = write_run_page(groups[0].folders[0], groups[0].report, questions_again(groups[0].report))
    else:
        page = comparison.write_page(baseline)
    console.print(f"Table and figure: {folder}\nTo pass on: {page}")


class Comparison:
    """The runs below a folder, as a table and as points of charts.

    Attributes:
        groups: the points.
        failed: names of runs without a report, each with what was typed.
        keys: the settings in which the points differ.
        cells: a row for each point.
        head, rows: the table of texts, without names that only repeat settings.
        curves: points by all settings but one, as `curves_of` returns them.
    """

    def __init__(self, folder: Path, baseline: str | None) -> None:
        self.folder, self.failed = folder, unfinished(folder)
        self.groups = groups = grouped(folder, load_reports(folder))
        self.reports = [group.report for group in groups]
        self.keys = differing(self.reports)
        pairs = [None] * len(groups) if baseline is None else differences(groups, find_baseline(groups, baseline))
        self.cells = [cells_of(group, pair, self.keys) for group, pair in zip(groups, pairs, strict=True)]
        self.by_settings = settings_distinguish(groups)
        self.title = ", ".join(sorted({f"{r['task']['name']} with {r['model']['path']}" for r in self.reports}))
        columns = [name for name in self.cells[0] if any(row[name][1] for row in self.cells)]
        self.head = columns[1:] if self.by_settings else columns
        texts = [{name: text for name, (text, _) in row.items()} for row in self.cells]
        names = short_names([group.name for group in groups])
        self.rows = [
            [(row | {"run": name})[column] for column in self.head] for name, row in zip(names, texts, strict=True)
        ]
        self.curves = curves_of(groups)

    def csv_text(self) -> str:
        """`comparison.csv`: a row a point, with numbers alone in its cells, for a program that plots."""
        rows = [{name: value for _, numbers in row.values() for name, value in numbers.items()} for row in self.cells]
        for name, typed in self.failed:
            known = {key: typed.get(f"decode.{key}", typed.get(key)) for key in self.keys}
            rows.append({"run": name} | known | {"status": FAILED})
        out = io.StringIO()
        writer = csv.DictWriter(out, dict.fromkeys(name for row in rows for name in row), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return out.getvalue()

    def print_table(self, console: Console) -> None:
        """Print the columns that fit: a number of requests that all runs have stands in the title."""
        title, hidden = self.title, []
        if len({report["requests"] for report in self.reports}) == 1:
            title += f", {self.reports[0]['requests']} requests{' each' if len(self.groups) > 1 else ''}"
            hidden.append("requests")
        if not self.by_settings and console.width < 120:  # names that a person gave say more than settings
            hidden += self.keys
        columns = [i for i, name in enumerate(self.head) if name not in hidden]
        table = Table(title=escape(title), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for i in columns:
            name = "rows" if self.head[i] == "rows/token" and console.width < 100 else self.head[i]
            table.add_column(name, justify="left" if name == "run" else "right", overflow="fold")
        for row in (*self.rows, *map(self.failed_row, self.failed)):
            table.add_row(*(escape(row[i]) for i in columns))
        console.print(table)

    def failed_row(self, run: tuple[str, dict[str, str]]) -> list[str]:
        """The row of a run without a report: its name, what was typed, and that it is not finished."""
        name, typed = run
        known = {key: typed.get(f"decode.{key}", typed.get(key, "-")) for key in self.keys}
        results = [column for column in self.head if column not in ("run", *self.keys)]
        return [({"run": name, results[0]: FAILED} | known).get(column, "-") for column in self.head]

    def charts(self) -> list[Scatter]:
        """Accuracy against each speed, of the points that have both; points are numbered by their rows."""
        places = {index: (label, curve) for curve, runs in enumerate(self.curves.values()) for label, index in runs}
        charts = []
        for title, speed_of, sign in SPEEDS:
            points = []
            for index, (report, row) in enumerate(zip(self.reports, self.rows, strict=True)):
                speed = speed_of(report)
                if speed and "accuracy" in report:
                    cells = ", ".join(f"{name} {cell}" for name, cell in zip(self.head, row, strict=True))
                    low, high = (100 * end for end in accuracy_interval(report))
                    name, (label, curve) = str(index + 1), places[index]
                    accuracy = 100 * report["accuracy"]
                    points.append(Point(name, f"{name}. {cells}", speed, accuracy, low, high, label, curve))
            if points:
                charts.append(Scatter(title, points, sign))
        return charts

    def draw(self) -> None:
        """Write `pareto.pdf`, if all runs were judged."""
        if all("accuracy" in report for report in self.reports):
            from lopa_dist.jobs.show.pareto import draw_pareto  # matplotlib takes a second to import

            charts = [chart for chart in self.charts() if len(chart.points) == len(self.groups)]
            draw_pareto(self.folder / "pareto.pdf", charts, list(self.curves), named_points=not self.by_settings)

    def write_page(self, baseline: str | None) -> Path:
        """Write `comparison.html`; returns the file."""
        return write_page(
            self.folder / "comparison.html",
            "comparison.html",
            title=self.title,
            headline=headline(self.reports),
            charts=self.charts(),
            curves=list(self.curves) if len(self.curves) > 1 else [],
            along=growing(self.reports),
            head=["", *self.head],
            rows=[[str(number), *row] for number, row in enumerate(self.rows, 1)],
            commands=self.commands(),
            failed=[name for name, _ in self.failed],
            baseline=baseline,
        )

    def commands(self) -> list[tuple[str, str]]:
        """The number and folder of each run, and its command; without runs that Hydra did not start."""
        runs = [(number, run, group.report) for number, group in enumerate(self.groups, 1) for run in group.folders]
        lines = [(f"{number}. {run.relative_to(self.folder)}", command(run, report)) for number, run, report in runs]
        return [(name, line) for name, line in lines if line]


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
    told, spread = ["seeds", "streams", "accuracy_sd"], ""
    if report.get("accuracy_sd") == 0 and seeds_change_nothing(report):
        told, spread = told[:2], ", equal at temperature 0"
    elif "accuracy_sd" in report:
        spread = f", sd {report['accuracy_sd']:.1%}"
    seeds: dict[str, Any] = {key: report[key] for key in told if key in report}
    streams = f", {report['streams']} streams" if report.get("streams", 1) > 1 else ""
    cells["seeds"] = f"{report.get('seeds', 1)}{spread}{streams}", seeds
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


def seeds_change_nothing(report: dict[str, Any]) -> bool:
    """Whether every seed writes the same texts; lines of a batch may have temperatures of their own."""
    return "masks" not in report and report["task"]["name"] != "batch" and not report["decode"].get("temperature")


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
