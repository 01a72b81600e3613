"""`lopa-dist report FOLDER`: several runs in one table and one speed-accuracy picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lopa_dist.jobs.report import read_report, table


def load_reports(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """All reports under a folder, by the names of their run folders."""
    files = sorted(folder.rglob("report.json"))
    if not files:
        raise ValueError(f"{folder}: no report.json in it or below it; name a run or sweep folder")
    reports = [(str(f.parent.relative_to(folder)), read_report(f)) for f in files]
    for file, (_, report) in zip(files, reports, strict=True):
        if not {"task", "model", "decode", "tpf", "tokens_per_s", "requests"} <= set(report):
            raise ValueError(f"{file} is no report of a job; name a folder with jobs only")
    return reports


def differing(reports: Sequence[dict[str, Any]]) -> list[str]:
    """The decode keys in which the runs differ."""
    return [k for k in reports[0]["decode"] if len({json.dumps(r["decode"].get(k)) for r in reports}) > 1]


def rows_of(named: Sequence[tuple[str, dict[str, Any]]]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table, fastest last."""
    keys = differing([r for _, r in named])
    head = ["run", *keys, "accuracy", "TPF", "rows/token", "tokens/s", "requests"]
    rows = []
    for name, report in sorted(named, key=lambda pair: pair[1]["tpf"]):
        accuracy = f"{report['accuracy']:.1%}" if "accuracy" in report else "-"
        knobs = [str(report["decode"][k]) for k in keys]
        speed = f"{report['tokens_per_s']['job']:.0f}"
        computed = f"{report['rows_per_token']:.1f}" if "rows_per_token" in report else "-"
        rows.append([name, *knobs, accuracy, f"{report['tpf']:.2f}", computed, speed, str(report["requests"])])
    return head, rows


def compare(folder: Path, console: Console | None = None) -> None:
    """Print the table and write `comparison.md` and, where there are accuracies, `pareto.png`."""
    named = load_reports(folder)
    head, rows = rows_of(named)
    about = sorted({f"{report['task']['name']} with {report['model']['path']}" for _, report in named})
    console = console or Console()
    shown = Table(title=", ".join(about))
    knobs = range(1, head.index("accuracy"))
    if told_apart(named):
        columns = list(range(1, len(head)))
    else:  # names say more than settings: on a narrow terminal these are left out
        columns = [i for i in range(len(head)) if i not in knobs or console.width >= 120]
    for i in columns:
        shown.add_column(head[i], justify="left" if i == 0 else "right")
    short = short_names([row[0] for row in rows])
    for name, row in zip(short, rows, strict=True):
        shown.add_row(*([name, *row[1:]][i] for i in columns))
    console.print(shown)
    text = table(head, rows) + "\n"
    if all("accuracy" in report for _, report in named):
        from lopa_dist.jobs.plots import draw

        curves = curves_of(named)

        speeds: dict[str, Callable[[dict[str, Any]], float]] = {
            "tokens per forward (TPF)": lambda r: float(r["tpf"]),
            "tokens/s of the job": lambda r: float(r["tokens_per_s"]["job"]),
        }
        if all(report.get("rows_per_token") for _, report in named):
            speeds["tokens per 100 rows"] = lambda r: 100 / float(r["rows_per_token"])

        def paint(panels: Any) -> None:
            for axes, (axis, speed) in zip(panels, speeds.items(), strict=True):
                pareto(axes, curves, speed, axis, named_points=not told_apart(named))
                axes.set_ylabel("accuracy, %" if axes is panels[0] else "")
            panels[0].figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", frameon=False)

        count = len(speeds)
        text += f"\n![pareto]({draw(folder / 'pareto.png', paint, (4.8 * count, 4.4), panels=count)})\n"
    (folder / "comparison.md").write_text(text)
    console.print(f"Tables and plots: {folder}")


Point = tuple[str, dict[str, Any]]
"""What stands beside a point, and its report."""


def told_apart(named: Sequence[tuple[str, dict[str, Any]]]) -> bool:
    """Whether decode settings tell runs apart, and names only repeat them: a name that a person gave says more."""
    keys = differing([r for _, r in named])
    settings = {json.dumps([report["decode"].get(k) for k in keys]) for _, report in named}
    return len(settings) == len(named) and all("=" in name for name, _ in named)


def short_names(names: Sequence[str]) -> list[str]:
    """Names of a sweep's runs without the settings that all have."""
    parts = [name.split(",") for name in names]
    common = set.intersection(*map(set, parts))
    return [",".join(part for part in of if part not in common) or name for name, of in zip(names, parts, strict=True)]


def curves_of(named: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, list[Point]]:
    """Runs by all settings but the number of branches; along a curve only that grows (the paper's Figure 4)."""
    keys = differing([r for _, r in named])
    others = [k for k in keys if k != "branches"]
    curves: dict[str, list[Point]] = {}
    by_settings = told_apart(named)
    short = zip(short_names([name for name, _ in named]), [report for _, report in named], strict=True)
    for name, report in sorted(short, key=lambda pair: (pair[1]["decode"]["branches"], pair[0])):
        curve = ", ".join(f"{k}={report['decode'][k]}" for k in others)
        label = f"k={report['decode']['branches']}" if by_settings else name
        curves.setdefault(curve, []).append((label, report))
    return curves


def pareto(
    axes: Any, curves: dict[str, list[Point]], speed: Callable[[dict[str, Any]], float], axis: str, named_points: bool
) -> None:
    """Draw accuracy against a speed: a curve over k for each setting, and the front of what nothing beats in both.

    With `named_points` the names beside the points say what they are, and the legend leaves the settings out.
    """
    points = sorted((speed(r), 100 * r["accuracy"]) for curve in curves.values() for _, r in curve)
    front = [p for p in points if not any(q[0] >= p[0] and q[1] >= p[1] and q != p for q in points)]
    style: dict[str, Any] = {
        "color": "#cbd5e1",
        "linewidth": 5,
        "zorder": 1,
        "label": "front: no run beats these in both",
    }
    axes.step([p[0] for p in front], [p[1] for p in front], where="pre", **style)
    for curve, found in curves.items():
        x, y = [speed(r) for _, r in found], [100 * r["accuracy"] for _, r in found]
        line = "-" if len(found) > 2 else ""  # two points make no curve
        axes.plot(x, y, marker="o", markersize=4, linestyle=line, linewidth=1, zorder=2)[0].set_label(
            "_" if named_points else curve
        )
        for (label, _), at in zip(found, zip(x, y, strict=True), strict=True):
            axes.annotate(label, at, xytext=(4, 4), textcoords="offset points", fontsize=7)
    axes.set(xlabel=axis)
    axes.margins(0.12)
