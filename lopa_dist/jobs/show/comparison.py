"""The points of one task and model: a table with notes, charts of speed and accuracy, figures for a paper."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lopa_dist.jobs.show.cells import cells_of
from lopa_dist.jobs.show.notes import notes_of
from lopa_dist.jobs.show.page import Point, Scatter
from lopa_dist.jobs.show.paper_table import latex, markdown
from lopa_dist.jobs.show.point_names import curves_of, growing, names_of, settings_left_out, words_of
from lopa_dist.jobs.show.report import accuracy_interval, has_samples, judged
from lopa_dist.jobs.show.run_page import command
from lopa_dist.jobs.show.seed_groups import SeedGroup, Unfinished, differences, find_baseline, same_texts

FAILED = "not finished"
WIDE, COLUMN = 7.0, 3.3  # inches: the text and one column of most papers
NARROW = ("rows/token", "seeds", "tokens/s", "p")  # columns left out on a narrow terminal, in this order
LONGEST_WORD = 30  # the most characters of a name's word that are kept on one line
UNBOUNDED = 10_000  # characters per line: more than any table needs
SPEEDS: list[tuple[str, Callable[[dict[str, Any]], float | None], int]] = [
    ("Tokens per forward", lambda report: None if "masks" in report else report["tpf"], 1),
    ("Rows of the model computed per token", lambda report: report.get("rows_per_token"), -1),
    ("Tokens per second of the job", lambda report: report["tokens_per_s"]["job"], 1),
]
"""What accuracy is drawn against: its title, how to read it from a report, and -1 where less is faster."""


class Comparison:
    """The points of one task and model, as a table and as points of charts.

    Attributes:
        groups: the points.
        failed: names of runs without a report, each with what was typed.
        cells: a row for each point.
        names: of the points: what tells them apart, and nothing else (`names_of`).
        head, rows: the table as texts.
        notes, named_notes: what a reader must know, with points called by their numbers, and by their names.
        curves: the points of each curve, as `curves_of` returns them.
        along: the setting that grows along the curves; None where each has one point.
    """

    def __init__(
        self,
        folder: Path,
        groups: Sequence[SeedGroup],
        baseline: str | None,
        failed: Sequence[Unfinished],
    ) -> None:
        self.folder, self.groups, self.failed, self.baseline = folder, groups, failed, baseline
        self.reports = [group.report for group in groups]
        base = None if baseline is None else find_baseline(groups, baseline)
        self.base = next((index for index, group in enumerate(groups) if group is base), None)
        pairs = [None] * len(groups) if base is None else differences(groups, base)
        same = [None] * len(groups) if base is None else same_texts(groups, base)
        words = words_of(groups)
        self.names = names_of(groups, words)
        self.cells = [cells_of(*point) for point in zip(self.names, groups, pairs, same, strict=True)]
        self.title = title_of(self.reports[0])
        self.headline = headline(groups)
        numbers = [str(number) for number in range(1, len(groups) + 1)]
        self.notes, self.named_notes = (
            settings_left_out(self.names, words, called) + notes_of(groups, pairs, called)
            for called in (numbers, self.names)
        )
        self.head = [name for name in self.cells[0] if any(row[name][1] for row in self.cells)]
        self.rows = [[row[column][0] for column in self.head] for row in self.cells]
        self.curves = curves_of(groups)
        self.along = growing(words) if any(len(runs) > 1 for runs in self.curves.values()) else None
        self.drawn: list[str] = []  # names of the figures' files
        self.least_name = min(LONGEST_WORD, max(len(word) for name in self.names for word in name.split()))
        self.numbered = [[str(number), *row] for number, row in enumerate(self.rows, 1)]

    def methods(self) -> str:
        """Return how accuracies and their differences are worked out, in words; empty where nothing is judged."""
        if not any(name.startswith("accuracy") for name in self.head):
            return ""
        seeds = any(report.get("seeds", 1) > 1 for report in self.reports)
        words = "Accuracies have Wilson's 95 % confidence intervals"
        words += ", of several seeds around the mean and as wide as one run's" if seeds else ""
        if any("accuracy_sd" in report for report in self.reports):
            words += "; sd is the standard deviation of the seeds' accuracies, each over all problems"
        if "difference" in self.head:
            assert self.base is not None
            words += (
                f"; differences are from {self.names[self.base]} on the same problems, with the intervals of Agresti "
                "and Min (2005), and p is that of "
            )
            samples = any(map(has_samples, self.reports))
            means = " and ".join(["seeds"] * seeds + ["samples"] * samples)
            words += f"the sign test of the problems' means over {means}" if means else "McNemar's exact test"
        return f"{words}."

    def heading(self) -> tuple[str, list[str]]:
        """Return the table's title, with the number of requests if it is the same for all, and columns to leave out."""
        if len({row["requests"][0] for row in self.cells}) > 1:
            return self.title, []
        number, more = re.fullmatch(r"(\d+)(.*)", self.cells[0]["requests"][0]).groups()  # type: ignore[union-attr]
        return f"{self.title}, {number} requests{more}{' each' if len(self.groups) > 1 else ''}", ["requests"]

    def paper_table(self, form: str) -> str:
        """Return the table for a paper (`form` is ``latex``) or a README (``markdown``)."""
        names = [name for name, _ in self.failed]
        notes = self.named_notes + ([f"Not finished, so not above: {', '.join(names)}"] if names else [])
        title, hidden = self.heading()
        head, *rows = (
            [cell for cell, name in zip(row, self.head, strict=True) if name not in hidden]
            for row in (self.head, *self.rows)
        )
        return {"latex": latex, "markdown": markdown}[form](title, head, rows, self.methods(), notes)

    def print_table(self, console: Console) -> None:
        """Print the table and its notes, without columns for which a narrow terminal has no room."""
        title, hidden = self.heading()
        narrow = list(NARROW)
        while True:
            table = self.table(title, hidden)
            wide = console.measure(table, options=console.options.update(max_width=UNBOUNDED)).maximum
            least = wide - max(map(len, self.names)) + self.least_name
            if least <= console.width or not narrow:
                break
            hidden.append(narrow.pop(0))
        console.width = max(console.width, least)  # a terminal may break lines, but not figures
        console.print(table)
        notes = list(map(escape, self.notes))
        if left_out := [name for name in hidden if name in NARROW and name in self.head]:
            notes.append(f"left out for lack of room; they are in comparison.csv: {', '.join(left_out)}")
        if notes:
            console.print(*notes, "", sep="\n")  # an empty line ends the notes, as it ends a table

    def table(self, title: str, hidden: Collection[str]) -> Table:
        """Return the table of the columns that are not `hidden`."""
        columns = [i for i, name in enumerate(self.head) if name not in hidden]
        table = Table(title=escape(title), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for i in columns:
            if self.head[i] != "run":  # only names may be broken into lines
                table.add_column(self.head[i], justify="right", no_wrap=True)
                continue
            table.add_column("run", min_width=self.least_name, overflow="fold")
        rows = [[f"{number}. {name}", *row] for number, (name, *row) in enumerate(self.rows, 1)]
        for row in (*(rows if len(rows) > 1 else self.rows), *map(self.failed_row, self.failed)):
            table.add_row(*(escape(row[i]) for i in columns))
        return table

    def failed_row(self, run: Unfinished) -> list[str]:
        """Return the row of a run without a report, which says that it is not finished."""
        columns = {"run": run[0].replace("decode.", "").replace(",", ", "), self.head[1]: FAILED}
        return [columns.get(column, "-") for column in self.head]

    @cached_property
    def charts(self) -> list[Scatter]:
        """Return charts of accuracy against each speed, with the points that have both, numbered by their rows."""
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

    def draw(self, which: str) -> None:
        """Write the figures for a paper if all runs were judged: one two columns wide, and one a single column wide.

        Args:
            which: the end of the files' names; empty if there is only one section.
        """
        charts = [chart for chart in self.charts if len(chart.points) == len(self.groups)]
        if charts and len(self.groups) > 1:
            from lopa_dist.jobs.show.pareto import draw_pareto  # matplotlib takes a second to import

            name = f"pareto{re.sub(r'[^A-Za-z0-9.]+', '-', which)}"
            curves = [curve or self.title for curve in self.curves]
            self.drawn = [f"{name}.pdf", f"{name}-column.pdf"]
            draw_pareto(self.folder / self.drawn[0], charts, curves, WIDE)
            draw_pareto(self.folder / self.drawn[1], charts[:1], curves, COLUMN)

    def commands(self) -> list[tuple[str, str]]:
        """Return the number and folder of each run that Hydra started, as one text, and the run's command."""
        runs = [(number, run, group.report) for number, group in enumerate(self.groups, 1) for run in group.folders]
        lines = [(f"{number}. {run.relative_to(self.folder)}", command(run, report)) for number, run, report in runs]
        return [(name, line) for name, line in lines if line]


def title_of(report: dict[str, Any]) -> str:
    """Return the title of a report's section: its task and model."""
    task = report["task"]
    return f"{task.get('harness') or task['name']} with {report['model']['path']}"


def headline(groups: Sequence[SeedGroup]) -> str:
    """Return the outcome in words; points are called by their numbers."""
    reports, runs = [group.report for group in groups], sum(len(group.folders) for group in groups)
    if len(groups) == 1:
        return f"One setting, {runs} run{'s' * (runs > 1)}."
    many = f"{len(groups)} runs" if runs == len(groups) else f"{len(groups)} settings, {runs} runs"
    scored = any("masks" in report for report in reports)  # which generates no tokens
    words = f"{many}{'' if scored else ', in the order of tokens per forward pass'}."
    of = [(r["accuracy"], r["tpf"], number) for number, r in enumerate(reports, 1) if "accuracy" in r]
    if not of or scored:
        return words
    best, fastest = max(of), max(of, key=lambda run: run[1])
    equals = [number for accuracy, _, number in of if accuracy == best[0]]
    if len({judged(r) for r in reports if "accuracy" in r}) > 1:
        words += " They have judged different numbers of answers, so their accuracies are not of the same problems."
    elif len(equals) == 1:
        words += f" Number {best[2]} is the most accurate: {best[0]:.1%} at {best[1]:.2f} tokens per forward pass."
    else:
        which = "All" if len(equals) == len(of) else f"Numbers {', '.join(map(str, equals))}"
        words += f" {which} have the {'same' if len(equals) == len(of) else 'highest'} accuracy, {best[0]:.1%}."
    return f"{words} Number {fastest[2]} has the most tokens per forward pass: {fastest[0]:.1%} at {fastest[1]:.2f}."
