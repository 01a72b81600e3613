"""`lopa-dist report FOLDER`: several runs in one table and one speed-accuracy picture, and as a page."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lopa_dist.encodable import encodable
from lopa_dist.jobs.commands.explain import shown
from lopa_dist.jobs.show.page import Point, Scatter, write_page
from lopa_dist.jobs.show.paired import Paired
from lopa_dist.jobs.show.report import accuracy_interval, judged
from lopa_dist.jobs.show.run_page import asked_again, command, write_run_page
from lopa_dist.jobs.show.sweep import (
    Group,
    differences,
    find_baseline,
    grouped,
    load_reports,
    settings_by_name,
    unfinished,
)
from lopa_dist.whole import named as naming

if TYPE_CHECKING:
    from lopa_dist.jobs.show.pareto import Speed

ACCURACY = "accuracy %"  # with the 95 % confidence interval
FAILED = "not finished"


def differing(reports: Sequence[dict[str, Any]]) -> list[str]:
    """The settings in which the runs differ."""
    runs = [settings_by_name(report) for report in reports]
    return [k for k in runs[0] if len({json.dumps(settings.get(k)) for settings in runs}) > 1]


def rows_of(groups: Sequence[Group], pairs: Sequence[Paired | None] | None = None) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table; where no run was judged, without accuracy.

    Args:
        groups: the points.
        pairs: each compared with a baseline, if there is one.
    """
    reports = [group.report for group in groups]
    keys = differing(reports)
    judged_any = any("accuracy" in report for report in reports)
    several = any("seeds" in report for report in reports)
    head = ["run", *keys, *([ACCURACY] if judged_any else []), *(["seeds"] if several else [])]
    head += [*(["difference", "p"] if pairs else []), "TPF", "rows/token", "tokens/s", "requests"]
    rows = []
    for i, (group, report) in enumerate(zip(groups, reports, strict=True)):
        row = [group.name, *(shown(settings_by_name(report).get(k)) for k in keys)]
        if judged_any:
            row.append(accuracy_cell(report) if "accuracy" in report else "-")
        if several:
            spread = f", sd {report['accuracy_sd']:.1%}" if "accuracy_sd" in report else ""
            row.append(f"{report.get('seeds', 1)}{spread}")
        if pairs:
            row += difference_cells(pairs[i])
        computed = f"{report['rows_per_token']:.1f}" if report.get("rows_per_token") else "-"
        row += [f"{report['tpf']:.2f}", computed, f"{report['tokens_per_s']['job']:.0f}", str(report["requests"])]
        rows.append(row)
    return head, rows


def accuracy_cell(report: dict[str, Any]) -> str:
    """The accuracy with its interval, as short as a narrow terminal needs it."""
    low, high = accuracy_interval(report)
    return f"{100 * report['accuracy']:.1f} ({100 * low:.1f}-{100 * high:.1f})"


def difference_cells(pair: Paired | None) -> list[str]:
    """The difference to the baseline with its interval, and the p of McNemar's test."""
    if pair is None:
        return ["-", "-"]
    low, high = 100 * pair.low, 100 * pair.high
    return [f"{100 * pair.difference:+.1f} ({low:+.1f},{high:+.1f})", f"{pair.p:.2g}"]


def compare(folder: Path, console: Console | None = None, baseline: str | None = None) -> None:
    """Print the table; write `comparison.csv`, a page, and `pareto.pdf` if all runs were judged.

    The page is `comparison.html`, or for a single run its `report.html`.

    Args:
        folder: has the runs.
        console: to print on.
        baseline: the run that all others are compared with, by its name or by settings that it alone has.
    """
    groups = grouped(folder, load_reports(folder))
    pairs = None if baseline is None else differences(groups, find_baseline(groups, baseline))
    failed = unfinished(folder)
    head, rows = rows_of(groups, pairs)
    title = ", ".join(
        sorted({f"{group.report['task']['name']} with {group.report['model']['path']}" for group in groups})
    )
    console = console or Console()
    by_settings = settings_distinguish(groups)
    start = int(by_settings)  # from which column on: names that only repeat settings are left out
    brief = [[name, *row[1:]] for name, row in zip(short_names([row[0] for row in rows]), rows, strict=True)]
    lost = [[name, *(typed.get(f"decode.{k}", typed.get(k, "-")) for k in head[1:])] for name, typed in failed]
    for row in lost:
        row[1 + len(differing([group.report for group in groups]))] = FAILED
    print_table(console, title, head, [*brief, *lost], start, groups)
    for name, _ in failed:
        console.print(escape(f"{FAILED}: {folder / name} (cli.log there says more)"))
    file = folder / "comparison.csv"
    with naming(file):
        file.write_text(encodable(csv_text(groups, pairs, failed)), encoding="utf-8", newline="")
    if all("accuracy" in group.report for group in groups):
        from lopa_dist.jobs.show.pareto import draw_pareto  # matplotlib takes a second to import

        speeds = [speed for speed in SPEEDS if all(speed[1](group.report) for group in groups)]
        draw_pareto(folder / "pareto.pdf", curves_of(groups), speeds, named_points=not by_settings)
    if len(groups) > 1:
        page = write_comparison_page(
            folder, title, groups, head[start:], [row[start:] for row in brief], failed, baseline
        )
    else:
        run, report = groups[0].folders[0], groups[0].report
        page = write_run_page(run, report, asked_again(report))
    console.print(f"Table and figure: {folder}\nTo pass on: {page}")


def print_table(
    console: Console, title: str, head: list[str], rows: list[list[str]], start: int, groups: Sequence[Group]
) -> None:
    """Print the columns that fit: a number of requests that all runs have stands in the title."""
    knobs = range(1, 1 + len(differing([group.report for group in groups])))
    counts = {group.report["requests"] for group in groups}
    if one := len(counts) == 1:
        title += f", {counts.pop()} requests{' each' if len(groups) > 1 else ''}"
    # names that a person gave say more than settings, which are left out on a narrow terminal
    columns = [i for i in range(start, len(head)) if start or i not in knobs or console.width >= 120]
    if one:
        columns.remove(len(head) - 1)
    printed = Table(title=escape(title), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for i in columns:
        name = "rows" if head[i] == "rows/token" and console.width < 100 else head[i]
        printed.add_column(name, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        printed.add_row(*(escape(row[i]) for i in columns))
    console.print(printed)


def csv_text(
    groups: Sequence[Group], pairs: Sequence[Paired | None] | None, failed: Sequence[tuple[str, dict[str, str]]]
) -> str:
    """`comparison.csv`: a row a point, with numbers alone in its cells, for a program that plots."""
    keys = differing([group.report for group in groups])
    rows: list[dict[str, Any]] = []
    for i, group in enumerate(groups):
        report = group.report
        row: dict[str, Any] = {"run": group.name} | {key: shown(settings_by_name(report).get(key)) for key in keys}
        if "accuracy" in report:
            low, high = accuracy_interval(report)
            row |= {
                "accuracy": report["accuracy"],
                "accuracy_low": low,
                "accuracy_high": high,
                "judged": judged(report),
            }
        row |= {key: report[key] for key in ("seeds", "accuracy_sd") if key in report}
        if pairs and (pair := pairs[i]):
            row |= {"difference": pair.difference, "difference_low": pair.low, "difference_high": pair.high}
            row |= {"better": pair.better, "worse": pair.worse, "mcnemar_p": pair.p}
        row |= {"tpf": report["tpf"], "rows_per_token": report.get("rows_per_token")}
        row |= {"tokens_per_s": report["tokens_per_s"]["job"], "requests": report["requests"], "status": "finished"}
        rows.append(row)
    for name, typed in failed:
        known = {key: typed.get(f"decode.{key}", typed.get(key)) for key in keys}
        rows.append({"run": name} | known | {"status": FAILED})
    columns = list(dict.fromkeys(key for row in rows for key in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


Run = tuple[str, dict[str, Any]]
"""What stands beside a run's point, and its report."""


def settings_distinguish(groups: Sequence[Group]) -> bool:
    """Whether the runs' settings differ, and their names only repeat them: a name that a person gave says more."""
    keys = differing([group.report for group in groups])
    settings = {json.dumps([settings_by_name(group.report).get(k) for k in keys]) for group in groups}
    return len(settings) == len(groups) and all("=" in group.name for group in groups)


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


def curves_of(groups: Sequence[Group]) -> dict[str, list[Run]]:
    """Runs by all settings but one, which grows along each curve (`growing`)."""
    reports = [group.report for group in groups]
    along, by_settings = growing(reports), settings_distinguish(groups)
    others = [key for key in differing(reports) if key != along]
    found = []
    for name, report in zip(short_names([group.name for group in groups]), reports, strict=True):
        settings = settings_by_name(report)
        value = None if along is None else settings[along]
        label = "" if along is None else f"{SYMBOLS.get(along, along)}={shown(value)}"
        curve = ", ".join(f"{key}={shown(settings.get(key))}" for key in others)
        found.append((inf if value is None else value, label if by_settings else name, curve, report))
    curves: dict[str, list[Run]] = {}
    for _, label, curve, report in sorted(found, key=lambda run: run[:3]):
        curves.setdefault(curve, []).append((label, report))
    return curves


SPEEDS: list[Speed] = [
    ("Tokens per forward", lambda report: report["tpf"], 1),
    ("Rows of the model computed per token", lambda report: report.get("rows_per_token"), -1),
    ("Tokens a second of the job", lambda report: report["tokens_per_s"]["job"], 1),
]
"""What accuracy is drawn against."""


def write_comparison_page(
    folder: Path,
    title: str,
    groups: Sequence[Group],
    head: list[str],
    rows: list[list[str]],
    failed: Sequence[tuple[str, dict[str, str]]] = (),
    baseline: str | None = None,
) -> Path:
    """Write the page; returns the file.

    Args:
        folder: of the runs.
        title: what they have in common.
        groups: the points.
        head, rows: a table of the points, in the same order.
        failed: runs without a report.
        baseline: what the others are compared with.
    """
    tooltips = [
        f"{number}. " + ", ".join(f"{name} {cell}" for name, cell in zip(head, row, strict=True))
        for number, row in enumerate(rows, 1)
    ]
    commands = [
        (f"{i}. {run.relative_to(folder)}", command(run, group.report))
        for i, group in enumerate(groups, 1)
        for run in group.folders
    ]
    curves = curves_of(groups)
    numbers = {id(report): n for n, curve in enumerate(curves.values()) for _, report in curve}
    along = growing([group.report for group in groups])
    return write_page(
        folder / "comparison.html",
        "comparison.html",
        title=title,
        headline=headline([group.report for group in groups]),
        charts=list(charts(groups, tooltips, [numbers[id(group.report)] for group in groups])),
        curves=list(curves) if len(curves) > 1 else [],
        along=along,
        head=["", *head],
        rows=[[str(number), *row] for number, row in enumerate(rows, 1)],
        commands=[(name, line) for name, line in commands if line],
        failed=[name for name, _ in failed],
        baseline=baseline,
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


def charts(groups: Sequence[Group], tooltips: Sequence[str], curves: Sequence[int]) -> Iterator[Scatter]:
    """Accuracy against each speed, of the points that have both; `curves` has the number of each one's curve."""
    for title, speed_of, sign in SPEEDS:
        points = []
        for number, (group, tooltip, curve) in enumerate(zip(groups, tooltips, curves, strict=True), 1):
            report, speed = group.report, speed_of(group.report)
            if speed and "accuracy" in report:
                low, high = accuracy_interval(report)
                points.append(
                    Point(str(number), tooltip, speed, 100 * report["accuracy"], 100 * low, 100 * high, curve)
                )
        if points:
            yield Scatter(title, points, sign)
