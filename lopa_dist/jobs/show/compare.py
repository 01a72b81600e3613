"""`lopa-dist report FOLDER`: several runs in one table and one speed-accuracy picture, and as a page."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from math import inf
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lopa_dist.encodable import encodable
from lopa_dist.jobs.show.page import Point, Scatter, front, write_page
from lopa_dist.jobs.show.report import accuracy_interval, read_report, table
from lopa_dist.jobs.show.run_page import asked_again, command, write_run_page

FRONT = "front: no run beats these in both"


def load_reports(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """All reports under a folder, by the names of their run folders.

    Runs inside another run's folder are left out: they are shards that were merged into it.
    """
    files = sorted(folder.rglob("report.json"))
    runs = {file.parent for file in files}
    files = [file for file in files if runs.isdisjoint(file.parent.parents)]
    if not files:
        raise ValueError(f"{folder}: no report.json in it or below it; name a run or sweep folder")
    reports = [(str(f.parent.relative_to(folder)), read_report(f)) for f in files]
    for file, (_, report) in zip(files, reports, strict=True):
        if not {"task", "model", "decode", "tpf", "tokens_per_s", "requests"} <= set(report):
            raise ValueError(f"{file} is no report of a job; name a folder with jobs only")
    return reports


def settings_by_name(report: dict[str, Any]) -> dict[str, Any]:
    """What a run's texts depend on, by name; names of decode settings go without their section."""
    sections = {"": "decode", "model.": "model", "task.": "task"}
    found = {prefix + key: value for prefix, name in sections.items() for key, value in report[name].items()}
    return found | {"seed": report.get("seed")}


def differing(reports: Sequence[dict[str, Any]]) -> list[str]:
    """The settings in which the runs differ."""
    runs = [settings_by_name(report) for report in reports]
    return [k for k in runs[0] if len({json.dumps(settings.get(k)) for settings in runs}) > 1]


def rows_of(named: Sequence[tuple[str, dict[str, Any]]]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table; where no run was judged, without accuracy."""
    keys = differing([r for _, r in named])
    judged = ["accuracy"] if any("accuracy" in report for _, report in named) else []
    head = ["run", *keys, *judged, "TPF", "rows/token", "tokens/s", "requests"]
    rows = []
    for name, report in named:
        accuracy = [f"{report['accuracy']:.1%}" if "accuracy" in report else "-"] if judged else []
        knobs = [shown(settings_by_name(report).get(k)) for k in keys]
        speed = f"{report['tokens_per_s']['job']:.0f}"
        computed = f"{report['rows_per_token']:.1f}" if "rows_per_token" in report else "-"
        rows.append([name, *knobs, *accuracy, f"{report['tpf']:.2f}", computed, speed, str(report["requests"])])
    return head, rows


def compare(folder: Path, console: Console | None = None) -> None:
    """Print the table, write `comparison.md`, where there are accuracies `pareto.png`, and a page.

    The page is `comparison.html`, or of a single run its `report.html`.
    """
    named = sorted(load_reports(folder), key=lambda pair: pair[1]["tpf"])
    head, rows = rows_of(named)
    title = ", ".join(sorted({f"{report['task']['name']} with {report['model']['path']}" for _, report in named}))
    console = console or Console()
    printed = Table(title=escape(title))
    by_settings = settings_distinguish(named)
    start = int(by_settings)  # from which column on: names that only repeat settings are left out
    brief = [[name, *row[1:]] for name, row in zip(short_names([row[0] for row in rows]), rows, strict=True)]
    knobs = range(1, 1 + len(differing([r for _, r in named])))
    # names that a person gave say more than settings, which are left out on a narrow terminal
    columns = [i for i in range(start, len(head)) if start or i not in knobs or console.width >= 120]
    for i in columns:
        printed.add_column(head[i], justify="left" if i == 0 else "right")
    for row in brief:
        printed.add_row(*(escape(row[i]) for i in columns))
    console.print(printed)
    text = table(head, rows) + "\n"
    if all("accuracy" in report for _, report in named):
        from lopa_dist.jobs.show.plots import draw

        curves = curves_of(named)
        speeds: dict[str, Callable[[dict[str, Any]], float]] = {
            "tokens per forward (TPF)": lambda r: float(r["tpf"]),
            "tokens/s of the job": lambda r: float(r["tokens_per_s"]["job"]),
        }
        if all(report.get("rows_per_token") for _, report in named):
            speeds["tokens per 100 rows"] = lambda r: 100 / float(r["rows_per_token"])

        def paint(panels: Any) -> None:
            for axes, (axis, speed) in zip(panels, speeds.items(), strict=True):
                pareto(axes, curves, speed, axis, named_points=not by_settings)
                axes.set_ylabel("accuracy, %" if axes is panels[0] else "")
            panels[0].figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", frameon=False)

        count = len(speeds)
        text += f"\n![pareto]({draw(folder / 'pareto.png', paint, (4.8 * count, 4.4), panels=count)})\n"
    (folder / "comparison.md").write_text(encodable(text), encoding="utf-8")
    if len(named) > 1:
        page = write_comparison_page(folder, title, named, head[start:], [row[start:] for row in brief])
    else:
        run, report = folder / named[0][0], named[0][1]
        page = write_run_page(run, report, asked_again(report))
    console.print(f"Tables and plots: {folder}\nTo pass on: {page}")


Run = tuple[str, dict[str, Any]]
"""What stands beside a run's point, and its report."""


def settings_distinguish(named: Sequence[tuple[str, dict[str, Any]]]) -> bool:
    """Whether the runs' settings differ, and their names only repeat them: a name that a person gave says more."""
    keys = differing([r for _, r in named])
    settings = {json.dumps([settings_by_name(report).get(k) for k in keys]) for _, report in named}
    return len(settings) == len(named) and all("=" in name for name, _ in named)


def short_names(names: Sequence[str]) -> list[str]:
    """Names of a sweep's runs without the settings that all have."""
    parts = [name.split(",") for name in names]
    common = set.intersection(*map(set, parts))
    return [",".join(part for part in of if part not in common) or name for name, of in zip(names, parts, strict=True)]


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


SYMBOLS = {"branches": "k", "drafts": "m"}


def shown(value: Any) -> str:
    """A setting's value, as it is given on the command line."""
    return "null" if value is None else str(value)


def curves_of(named: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, list[Run]]:
    """Runs by all settings but one, which grows along each curve (`growing`)."""
    reports = [report for _, report in named]
    along, by_settings = growing(reports), settings_distinguish(named)
    others = [key for key in differing(reports) if key != along]
    found = []
    for name, report in zip(short_names([name for name, _ in named]), reports, strict=True):
        settings = settings_by_name(report)
        value = None if along is None else settings[along]
        label = "" if along is None else f"{SYMBOLS.get(along, along)}={shown(value)}"
        curve = ", ".join(f"{key}={shown(settings.get(key))}" for key in others)
        found.append((inf if value is None else value, label if by_settings else name, curve, report))
    curves: dict[str, list[Run]] = {}
    for _, label, curve, report in sorted(found, key=lambda run: run[:3]):
        curves.setdefault(curve, []).append((label, report))
    return curves


def pareto(
    axes: Any, curves: dict[str, list[Run]], speed: Callable[[dict[str, Any]], float], axis: str, named_points: bool
) -> None:
    """Draw accuracy against a speed: a curve for each setting, and the front of what nothing beats in both.

    With `named_points` the names beside the points say what they are, and the legend leaves the settings out.
    """
    best = front([(speed(r), 100 * r["accuracy"]) for curve in curves.values() for _, r in curve])
    axes.step(*zip(*best, strict=True), where="pre", color="#cbd5e1", linewidth=5, zorder=1, label=FRONT)
    for curve, found in curves.items():
        x, y = [speed(r) for _, r in found], [100 * r["accuracy"] for _, r in found]
        line = "-" if len(found) > 2 else ""  # two points make no curve
        color = "#1f2933" if named_points else None  # a colour without a legend would seem to mean something
        legend = "_" if named_points else curve
        axes.plot(x, y, marker="o", markersize=4, linestyle=line, linewidth=1, zorder=2, color=color, label=legend)
        for (label, _), at in zip(found, zip(x, y, strict=True), strict=True):
            axes.annotate(label, at, xytext=(4, 4), textcoords="offset points", fontsize=7)
    axes.set(xlabel=axis)
    axes.margins(0.12)


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
        folder / "comparison.html",
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
