"""`lopa-dist report FOLDER`: several runs in one table, in one figure of speed and accuracy, and as a page."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from math import inf, isfinite
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
from lopa_dist.jobs.show.report import accuracy_interval, draws, has_samples, judged, prompts, read_report, typed_words
from lopa_dist.jobs.show.run_page import command, questions_again, write_run_page
from lopa_dist.jobs.show.run_state import is_run, last_line, state_of
from lopa_dist.jobs.show.seed_groups import (
    SEEDS,
    SeedGroup,
    baselines,
    differences,
    find_baseline,
    grouped,
    in_words,
    load_reports,
    same_texts,
    settings_by_name,
    unfinished,
)

FAILED = "not finished"
UNTOLD = (
    "task.shard",
    "hydra.run.dir",
    "hydra.sweep.dir",
    "launcher",
    "hydra/launcher",
    *SEEDS,
)  # settings by which points are not told apart
FEW = 60  # the most characters of settings after a name
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
        console.print(escape(f"Not compared with {baseline}, for it is of another task or model: {without}"))
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
        page = write_run_page(groups[0].folders[0], groups[0].report, questions_again(groups[0].report))
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
            console.print(escape(f"No figure of {part.title}, for not all was judged: {'; '.join(unjudged)}"))
    if older := sorted({figure.name for figure in folder.glob("pareto*.pdf")} - set(files)):
        console.print(escape(f"Of an earlier report of this folder, and not of this one: {', '.join(older)}"))
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
        for note in self.notes:
            console.print(escape(note))
        if left_out := [name for name in hidden if name in NARROW and name in self.head]:
            console.print(f"left out for lack of room; they are in comparison.csv: {', '.join(left_out)}")

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


def words_of(groups: Sequence[SeedGroup]) -> list[dict[str, str]]:
    """Return what tells each point apart, by setting: as typed if that is enough, else as reports have it.

    Settings that all points share are left out. The names of decode settings have no section. A point for which some
    of the other settings were typed is told apart by all of them, as its report has them.
    """
    typed = [
        dict(word.partition("=")[::2] for folder in group.folders[:1] for word in typed_words(folder))
        for group in groups
    ]
    for candidates in (typed, [in_words(group.report) for group in groups]):
        keys = [key for key in dict.fromkeys(key for words in candidates for key in words) if key not in UNTOLD]
        unlike = [key for key in keys if len({words.get(key) for words in candidates}) > 1]
        found = [{key.removeprefix("decode."): words[key] for key in unlike if key in words} for words in candidates]
        for words, group in zip(found, groups, strict=True):
            known = settings_by_name(group.report)
            more = {key.removeprefix("decode.") for key in unlike} - words.keys() if words else set()
            words |= {key: shown(known[key]) for key in sorted(more) if key in known}
        if len({json.dumps(words, sort_keys=True) for words in found}) == len(groups):
            return found
    return found


def names_of(groups: Sequence[SeedGroup], words: Sequence[dict[str, str]]) -> list[str]:
    """Return the points' names: what tells them apart, after the folder's name where a person chose that."""
    names = [settings_in_words(of) for of in words]
    given = all("=" not in group.name for group in groups)
    folders = short_names([group.folders[0].resolve().name if group.name == "." else group.name for group in groups])
    if len(set(names)) < len(names):
        return folders
    if given:
        if any(len(name) > FEW for name in names):  # in all rows or in none (`settings_left_out`)
            return folders
        return [f"{folder} ({name})" if name else folder for folder, name in zip(folders, names, strict=True)]
    if len(groups) == 1:  # nothing differs: all that was typed
        [group] = groups
        typed = [word.removeprefix("decode.") for word in typed_words(group.folders[0])]
        names = [", ".join(word for word in typed if word.partition("=")[0] not in UNTOLD)]
    return [name or "as configured" for name in names]


def settings_in_words(of: dict[str, str]) -> str:
    """Return the settings of a point as one text."""
    return ", ".join(f"{key}={value}" for key, value in of.items())


def settings_left_out(names: Sequence[str], words: Sequence[dict[str, str]], called: Sequence[str]) -> list[str]:
    """Return a note with the settings that tell the points apart, if they do not fit in the points' names.

    Args:
        names: of the points.
        words: what tells each point apart.
        called: how the note calls each point.
    """
    settings = [settings_in_words(of) for of in words]
    if all(of in name for of, name in zip(settings, names, strict=True)):
        return []
    listed = "; ".join(f"run {name}: {of or 'as configured'}" for name, of in zip(called, settings, strict=True))
    return [f"Settings in which the runs differ: {listed}."]


def short_names(names: Sequence[str]) -> list[str]:
    """Return the names of a sweep's runs without the settings that all have."""
    common = set.intersection(*(set(name.split(",")) for name in names))
    return [",".join(part for part in name.split(",") if part not in common) or name for name in names]


def growing(words: Sequence[dict[str, str]]) -> str | None:
    """Return the setting that grows along a curve: the one that leaves the fewest curves.

    Of equals, it is the branches (the paper's Figure 4), or else the one with most values, or the first. Only settings
    whose values are numbers, or null, count. None where no such setting differs.
    """
    numbers = {}
    for key in dict.fromkeys(key for of in words for key in of):
        values = {of.get(key, "null") for of in words} - {"null"}
        if key not in SEEDS and all(is_number(value) for value in values):
            curves = {json.dumps({other: of[other] for other in sorted(of) if other != key}) for of in words}
            numbers[key] = -len(curves), key == "branches", len(values)
    return max(numbers, key=numbers.__getitem__, default=None)


def is_number(text: str) -> bool:
    """Return whether a setting's text is a finite number."""
    try:
        return isfinite(float(text))
    except ValueError:
        return False


def curves_of(groups: Sequence[SeedGroup]) -> dict[str, list[tuple[str, int]]]:
    """Return the points of each curve, as labels and indices, by what tells the curves apart.

    One setting grows along each curve (`growing`); null comes after all numbers. Where a person chose the folders'
    names, each point is a curve of its own.
    """
    words = words_of(groups)
    names, along = short_names([group.name for group in groups]), growing(words)
    points = []
    for index, (name, of) in enumerate(zip(names, words, strict=True)):
        usual = in_words(groups[index].report).get(along or "", "null")
        value = of.get(along, usual) if along else "null"
        others = ", ".join(f"{key}={text}" for key, text in of.items() if key != along)
        if all("=" not in group.name for group in groups):
            label, others = "", name
        else:
            label = f"{along}={value}" if along else ""
        points.append((float(value) if is_number(value) else inf, label, others, index))
    curves: dict[str, list[tuple[str, int]]] = {}
    for _, label, curve, index in sorted(points, key=lambda point: (point[0], by_number(point[2]), *point[1:])):
        curves.setdefault(curve, []).append((label, index))
    return curves


def by_number(text: str) -> list[tuple[float, str]]:
    """Return a key that sorts texts as people do: ``drafts=4`` before ``drafts=16``."""
    return [(float(part), "") if is_number(part) else (inf, part) for part in re.split(r"([=, ])", text)]


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
        words += f" The most accurate is number {best[2]}: {best[0]:.1%} at {best[1]:.2f}."
    else:
        which = "All" if len(equals) == len(of) else f"Numbers {', '.join(map(str, equals))}"
        words += f" {which} have the {'same' if len(equals) == len(of) else 'highest'} accuracy, {best[0]:.1%}."
    return f"{words} The most tokens per forward pass has number {fastest[2]}: {fastest[0]:.1%} at {fastest[1]:.2f}."
