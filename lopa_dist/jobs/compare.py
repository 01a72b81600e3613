"""`lopa-dist report FOLDER`: several runs in one table and one speed-accuracy picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lopa_dist.jobs.report import table


def load_reports(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """All reports under a folder, by the names of their run folders."""
    files = sorted(folder.rglob("report.json"))
    if not files:
        raise ValueError(f"{folder}: no report.json in it or below it; name a run or sweep folder")
    return [(str(f.parent.relative_to(folder)), json.loads(f.read_text())) for f in files]


def differing(reports: Sequence[dict[str, Any]]) -> list[str]:
    """The decode keys in which the runs differ."""
    return [k for k in reports[0]["decode"] if len({json.dumps(r["decode"].get(k)) for r in reports}) > 1]


def rows_of(named: Sequence[tuple[str, dict[str, Any]]]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table, fastest last."""
    keys = differing([r for _, r in named])
    head = ["run", *keys, "accuracy", "TPF", "tokens/s", "requests"]
    rows = []
    for name, report in sorted(named, key=lambda pair: pair[1]["tpf"]):
        accuracy = f"{report['accuracy']:.1%}" if "accuracy" in report else "-"
        knobs = [str(report["decode"][k]) for k in keys]
        speed = f"{report['tokens_per_s']['job']:.0f}"
        rows.append([name, *knobs, accuracy, f"{report['tpf']:.2f}", speed, str(report["requests"])])
    return head, rows


def compare(folder: Path, console: Console | None = None) -> None:
    """Print the table and write `comparison.md` and, where there are accuracies, `pareto.png`."""
    named = load_reports(folder)
    head, rows = rows_of(named)
    shown = Table(title=f"{named[0][1]['task']['name']} with {named[0][1]['model']['path']}")
    for i, column in enumerate(head):
        shown.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        shown.add_row(*row)
    console = console or Console()
    console.print(shown)
    text = table(head, rows) + "\n"
    if all("accuracy" in report for _, report in named):
        from lopa_dist.jobs.plots import draw

        text += f"\n![pareto]({draw(folder / 'pareto.png', lambda axes: pareto(axes, named), (6.4, 4.2))})\n"
    (folder / "comparison.md").write_text(text)
    console.print(f"Tables and plots: {folder}")


def pareto(axes: Any, named: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Accuracy against tokens per forward, with the front of what nothing else beats in both."""
    points = sorted((r["tpf"], 100 * r["accuracy"], name) for name, r in named)
    front = [p for p in points if not any(q[0] >= p[0] and q[1] >= p[1] and q != p for q in points)]
    axes.plot([p[0] for p in front], [p[1] for p in front], color="#94a3b8", linewidth=1, zorder=1)
    axes.scatter([p[0] for p in points], [p[1] for p in points], color="#2563eb", zorder=2)
    for x, y, name in points:
        axes.annotate(name, (x, y), xytext=(5, 5), textcoords="offset points", fontsize=8)
    axes.set(title="Accuracy against speed", xlabel="tokens per forward (TPF)", ylabel="accuracy, %")
    axes.margins(0.15)
