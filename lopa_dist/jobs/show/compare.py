"""`lopa-dist report FOLDER`: several runs in one table, in one figure of speed and accuracy, and as a page."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lopa_dist.atomic import naming, no_room
from lopa_dist.checks import UserError
from lopa_dist.encodable import encodable
from lopa_dist.jobs.setup.settings import shown
from lopa_dist.jobs.show.equal_texts import EqualTexts
from lopa_dist.jobs.show.made_on import made_sentence
from lopa_dist.jobs.show.notes import notes_of
from lopa_dist.jobs.show.page import Point, Scatter, write_page
from lopa_dist.jobs.show.paired import Paired
from lopa_dist.jobs.show.paper_table import latex, markdown
from lopa_dist.jobs.show.point_names import curves_of, growing, names_of, settings_left_out, words_of
from lopa_dist.jobs.show.report import accuracy_interval, draws, has_samples, judged, prompts, read_report
from lopa_dist.jobs.show.run_page import command, questions_again, write_run_page
from lopa_dist.jobs.show.run_state import is_run, last_line, state_of
from lopa_dist.jobs.show.seed_groups import (
    SeedGroup,
    baselines,
    differences,
    find_baseline,
    grouped,
    load_reports,
    same_texts,
    settings_by_name,
    unfinished,
)
from lopa_dist.jobs.show.where_it_began import task_where_it_began

FAILED = "not finished"
MOST_MADE = 8  # the most machines and times that a page lists
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

Cells = dict[str, tuple[str, dict[str, Any]]]
"""A run's row. By column of the table: the text of its cell, and the same figures by column of `comparison.csv`."""


def compare(
    folder: Path,
    console: Console | None = None,
    baseline: str | None = None,
    form: str = "",
    among: Sequence[Path] = (),
) -> None:
    """Print a table per task and model; write `comparison.csv`, a page, and figures if all runs were judged.

    The page is `comparison.html`, or for a single run its `report.html`.

    Args:
        folder: the folder with the runs.
        console: to print on.
        baseline: the run that all others are compared with, by its name or by settings that it alone has.
        form: ``latex`` or ``markdown`` to print the tables in this form, and all else to standard error.
        among: folders in `folder` whose runs are compared; none: all.

    Raises:
        ValueError: there is nothing to compare, or some reports are damaged; the others are compared first.
    """
    damaged: list[str] = []
    groups, failed = grouped(folder, load_reports(folder, among, damaged)), unfinished(folder, among)
    console = console or Console(stderr=bool(form))
    sections = sections_of(groups)
    if baseline is not None and not any(has_baseline(section, baseline) for section in sections):
        find_baseline(groups, baseline)  # raises, and says what there is
    parts = [
        Comparison(folder, section, baseline if has_baseline(section, baseline) else None, failed if last else [])
        for section, last in zip(sections, [False] * (len(sections) - 1) + [True], strict=True)
    ]
    for part in parts:
        if form:
            names = [name for name, _ in part.failed]
            notes = part.named_notes + ([f"Not finished, so not above: {', '.join(names)}"] if names else [])
            title, hidden = part.heading()
            head, *rows = (
                [cell for cell, name in zip(row, part.head, strict=True) if name not in hidden]
                for row in (part.head, *part.rows)
            )
            print({"latex": latex, "markdown": markdown}[form](title, head, rows, part.methods(), notes))
        else:
            part.print_table(console)
    if baseline is not None and len(parts) > 1:
        without = ", ".join(part.title for part in parts if part.base is None)
        console.print(escape(f"Not compared with {baseline}, which is of another task or model: {without}"))
    for name, _ in failed:
        ends = f"; its log ends with: {last}" if (last := last_line(folder / name)) else ""
        console.print(escape(f"{FAILED}: {folder / name}{ends}"), soft_wrap=True)
    for line in going_on(groups):
        console.print(escape(line), soft_wrap=True)
    file = folder / "comparison.csv"
    try:
        with naming(file):
            file.write_text(encodable(csv_text(groups, parts)), encoding="utf-8", newline="")
    except OSError as error:
        if no_room(error, ""):
            raise
        raise UserError(
            f"the table is above, but {folder} cannot be written ({error.strerror}): no comparison.csv, figure or "
            "page; for those, copy the folder to one of your own"
        ) from error
    for part in parts:
        part.draw("" if len(parts) == 1 else f"-{part.title}")
    if len(groups) == 1 and len(groups[0].folders) == 1:
        [run] = groups[0].folders
        questions = questions_again(groups[0].report | {"task": task_where_it_began(run, groups[0].report["task"])})
        page = write_run_page(run, groups[0].report, questions)
        if not questions:
            console.print("The page has no prompts: the input cannot be read, or has changed.")
    else:
        page = write_page(
            folder / "comparison.html",
            "comparison.html",
            title=", ".join(part.title for part in parts),
            sections=parts,
            commands=[line for part in parts for line in part.commands()],
            failed=[name for name, _ in failed],
            baseline=baseline,
            made=list(dict.fromkeys(filter(None, (made_sentence(group.report) for group in groups))))[:MOST_MADE],
        )
    files = [file.name, *(name for part in parts for name in part.drawn)]
    console.print(escape(f"In {folder}: {', '.join(files)}\nTo pass on: {page}"))
    for part in parts:
        unjudged = [name for name, report in zip(part.names, part.reports, strict=True) if "accuracy" not in report]
        if len(part.groups) > 1 and 0 < len(unjudged) < len(part.groups):
            console.print(
                escape(f"No figure of {part.title}, because these runs were not judged: {'; '.join(unjudged)}")
            )
    if older := sorted({figure.name for figure in folder.glob("pareto*.pdf")} - set(files)):
        console.print(escape(f"Left from an earlier report of this folder: {', '.join(older)}"))
    if damaged:
        raise ValueError("not compared: " + "\n".join(damaged))


def going_on(groups: Sequence[SeedGroup]) -> Iterator[str]:
    """Yield a line for each run that has been started again since its report: the report is of less than its input."""
    for run in (run for group in groups for run in group.folders if is_run(run)):
        state, reported = state_of(run), read_report(run / "report.json").get("attempts", inf)
        if state.state != "complete" and state.record and state.record.number > reported:
            yield (
                f"{state.state.upper()}: {state.done:,} of {state.expected:,} requests of {run} are done; its figures "
                "here are those of its last report, before it was started again"
            )


def sections_of(groups: Sequence[SeedGroup]) -> list[list[SeedGroup]]:
    """Return the points by task and model: accuracies on different problems or of different models share no front."""
    sections: dict[str, list[SeedGroup]] = {}
    for group in groups:
        sections.setdefault(title_of(group.report), []).append(group)
    return list(sections.values())


def title_of(report: dict[str, Any]) -> str:
    """Return the title of a report's section: its task and model."""
    task = report["task"]
    return f"{task.get('harness') or task['name']} with {report['model']['path']}"


def has_baseline(groups: Sequence[SeedGroup], asked: str | None) -> bool:
    """Return whether some of the points are called as the baseline that was asked for, or have its settings."""
    return asked is not None and bool(baselines(groups, asked))


def csv_text(groups: Sequence[SeedGroup], parts: Sequence[Comparison]) -> str:
    """Return the text of `comparison.csv`: a row per point, its figures as bare numbers, for a program that plots."""
    keys = differing([group.report for group in groups])
    rows = []
    for part in parts:
        for group, cells in zip(part.groups, part.cells, strict=True):
            known = {key: shown(settings_by_name(group.report).get(key)) for key in keys}
            numbers = {name: value for _, figures in cells.values() for name, value in figures.items()}
            rows.append({"run": group.name} | known | numbers)
    for name, typed in parts[-1].failed:
        known = {key: typed.get(f"decode.{key}", typed.get(key, "")) for key in keys}
        rows.append({"run": name} | known | {"status": FAILED})
    out = io.StringIO()
    writer = csv.DictWriter(out, dict.fromkeys(name for row in rows for name in row), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


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
        failed: Sequence[tuple[str, dict[str, str]]],
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

    def failed_row(self, run: tuple[str, dict[str, str]]) -> list[str]:
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


def differing(reports: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of the settings in which the runs differ."""
    runs = [settings_by_name(report) for report in reports]
    return [k for k in runs[0] if len({json.dumps(settings.get(k)) for settings in runs}) > 1]


def cells_of(name: str, group: SeedGroup, pair: Paired | None, same: EqualTexts | None) -> Cells:
    """Return a point's row.

    Args:
        name: of the point.
        group: the point.
        pair: its comparison with a baseline, if there is one.
        same: how many of its texts are equal to the baseline's.
    """
    report = group.report
    cells: Cells = {"run": (name, {"name": name})}
    cells |= dict.fromkeys(("accuracy %", "seeds", "difference", "p", "equal texts"), ("-", {}))
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
    number, streams = report.get("seeds", 1), report.get("streams", 1)
    of_streams = f"{streams} of problems" if streams > 1 else ""
    of_seeds = f"{seeds_in_words(report)}{spread}" if number > 1 or not of_streams else ""
    cells["seeds"] = ", ".join(filter(None, (of_seeds, of_streams))), seeds
    if pair:
        numbers = {"difference": pair.difference, "difference_low": pair.low, "difference_high": pair.high}
        text = f"{100 * pair.difference:+.1f} ({100 * pair.low:+.1f},{100 * pair.high:+.1f})"
        cells["difference"] = text, numbers | {"better": pair.better, "worse": pair.worse}
        cells["p"] = f"{pair.p:.2g}", {"p": pair.p}
    if same:
        cells["equal texts"] = f"{same.equal:,} of {same.requests:,}", {"equal": same.equal, "equal_of": same.requests}
    rows, speed = report.get("rows_per_token"), report["tokens_per_s"]["job"]
    cells["TPF"] = ("-", {}) if "masks" in report else (f"{report['tpf']:.2f}", {"tpf": report["tpf"]})
    cells["rows/token"] = (f"{rows:.1f}", {"rows_per_token": rows}) if rows else ("-", {})
    cells["tokens/s"] = f"{speed:.0f}", {"tokens_per_s": speed}
    requests = str(report["requests"])
    if "accuracy" in report and judged(report) != report["requests"]:
        requests += f" ({judged(report)} judged)"
    numbers = {"requests": report["requests"], "status": "finished"}
    if has_samples(report):
        requests += f" ({prompts(report)} prompts)"
        numbers["prompts"] = prompts(report)
    cells["requests"] = requests, numbers
    return cells


def seeds_in_words(report: dict[str, Any]) -> str:
    """Return how many seeds a point has: a range if not every stream of problems has all."""
    counts = report.get("seeds_by_stream", {"": report.get("seeds", 1)}).values()
    return "-".join(map(str, sorted({min(counts), max(counts)})))


def seeds_change_nothing(report: dict[str, Any]) -> bool:
    """Return whether every seed writes the same texts."""
    return "masks" not in report and not draws(report)


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
