"""`lopa-dist report FOLDER`: several runs in one table, in one figure of speed and accuracy, and as a page."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from math import inf
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from lopa_dist.atomic import naming, no_room
from lopa_dist.checks import UserError
from lopa_dist.encodable import encodable
from lopa_dist.jobs.setup.settings import shown
from lopa_dist.jobs.show.comparison import FAILED, Comparison, title_of
from lopa_dist.jobs.show.made_on import made_sentence
from lopa_dist.jobs.show.page import write_page
from lopa_dist.jobs.show.report import read_report
from lopa_dist.jobs.show.run_page import questions_again, write_run_page
from lopa_dist.jobs.show.run_state import is_run, last_line, state_of
from lopa_dist.jobs.show.seed_groups import (
    SeedGroup,
    Unfinished,
    baselines,
    find_baseline,
    grouped,
    load_reports,
    settings_by_name,
    unfinished,
)
from lopa_dist.jobs.show.where_it_began import task_where_it_began

TABLE = "comparison.csv"
MOST_MADE = 8  # the most machines and times that a page lists


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
    console = console or Console(stderr=bool(form), emoji=False)
    parts = parts_of(folder, groups, failed, baseline)
    for part in parts:
        if form:
            print(part.paper_table(form))
        else:
            part.print_table(console)

    def say(lines: Iterable[str]) -> None:
        for line in lines:
            console.print(escape(line), soft_wrap=True)

    say(not_compared(parts, baseline))
    say(not_finished(folder, failed))
    say(going_on(groups))
    write_csv(folder, groups, parts)
    for part in parts:
        part.draw("" if len(parts) == 1 else f"-{part.title}")
    if len(groups) == 1 and len(groups[0].folders) == 1:
        [run] = groups[0].folders
        questions = questions_again(groups[0].report | {"task": task_where_it_began(run, groups[0].report["task"])})
        page = write_run_page(run, groups[0].report, questions)
        if not questions:
            say(["The page has no prompts: the input cannot be read, or has changed."])
    else:
        page = write_comparison(folder, groups, parts, failed, baseline)
    files = [TABLE, *(name for part in parts for name in part.drawn)]
    say([f"In {folder}: {', '.join(files)}", f"To pass on: {page}"])
    say(no_figure(parts))
    if older := sorted({figure.name for figure in folder.glob("pareto*.pdf")} - set(files)):
        say([f"Left from an earlier report of this folder: {', '.join(older)}"])
    if damaged:
        raise ValueError("not compared: " + "\n".join(damaged))


def parts_of(
    folder: Path, groups: Sequence[SeedGroup], failed: Sequence[Unfinished], baseline: str | None
) -> list[Comparison]:
    """Return a comparison per task and model, the last with the runs that have no report.

    Accuracies on different problems or of different models share no front.

    Raises:
        ValueError: no point is called as the baseline is, or more than one.
    """
    sections: dict[str, list[SeedGroup]] = {}
    for group in groups:
        sections.setdefault(title_of(group.report), []).append(group)
    asked = {title: baseline for title, section in sections.items() if baseline and baselines(section, baseline)}
    if baseline is not None and not asked:
        find_baseline(groups, baseline)  # raises, and says what there is
    *_, last = sections
    return [
        Comparison(folder, section, asked.get(title), failed if title == last else [])
        for title, section in sections.items()
    ]


def not_compared(parts: Sequence[Comparison], baseline: str | None) -> Iterator[str]:
    """Yield a line if some parts do not have the baseline that was asked for."""
    if baseline is not None and (without := [part.title for part in parts if part.base is None]):
        yield f"Not compared with {baseline}, which is of another task or model: {', '.join(without)}"


def not_finished(folder: Path, failed: Sequence[Unfinished]) -> Iterator[str]:
    """Yield a line for each run without a report, with the end of its log."""
    for name, _ in failed:
        ends = f"; its log ends with: {last}" if (last := last_line(folder / name)) else ""
        yield f"{FAILED}: {folder / name}{ends}"


def going_on(groups: Sequence[SeedGroup]) -> Iterator[str]:
    """Yield a line for each run that has been started again since its report: the report is of less than its input."""
    for run in (run for group in groups for run in group.folders if is_run(run)):
        state, reported = state_of(run), read_report(run / "report.json").get("attempts", inf)
        if state.state != "complete" and state.record and state.record.number > reported:
            yield (
                f"{state.state.upper()}: {state.done:,} of {state.expected:,} requests of {run} are done; its figures "
                "here are those of its last report, before it was started again"
            )


def no_figure(parts: Sequence[Comparison]) -> Iterator[str]:
    """Yield a line for each part that has no figure because some of its runs were not judged."""
    for part in parts:
        unjudged = [name for name, report in zip(part.names, part.reports, strict=True) if "accuracy" not in report]
        if len(part.groups) > 1 and 0 < len(unjudged) < len(part.groups):
            yield f"No figure of {part.title}, because these runs were not judged: {'; '.join(unjudged)}"


def write_comparison(
    folder: Path,
    groups: Sequence[SeedGroup],
    parts: Sequence[Comparison],
    failed: Sequence[Unfinished],
    baseline: str | None,
) -> Path:
    """Write `comparison.html`, and return where it is."""
    return write_page(
        folder / "comparison.html",
        "comparison.html",
        title=", ".join(part.title for part in parts),
        sections=parts,
        commands=[line for part in parts for line in part.commands()],
        failed=[name for name, _ in failed],
        baseline=baseline,
        made=list(dict.fromkeys(filter(None, (made_sentence(group.report) for group in groups))))[:MOST_MADE],
    )


def write_csv(folder: Path, groups: Sequence[SeedGroup], parts: Sequence[Comparison]) -> None:
    """Write `comparison.csv`.

    Raises:
        UserError: the folder cannot be written.
    """
    file = folder / TABLE
    try:
        with naming(file):
            file.write_text(encodable(csv_text(groups, parts)), encoding="utf-8", newline="")
    except OSError as error:
        if no_room(error, ""):
            raise
        raise UserError(
            f"the table is above, but {folder} cannot be written ({error.strerror}): no {TABLE}, figure or page; for "
            "those, copy the folder to one of your own"
        ) from error


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


def differing(reports: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of the settings in which the runs differ."""
    runs = [settings_by_name(report) for report in reports]
    return [k for k in runs[0] if len({json.dumps(settings.get(k)) for settings in runs}) > 1]
