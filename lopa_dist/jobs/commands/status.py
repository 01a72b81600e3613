"""`lopa-dist status FOLDER...`: how far runs and arrays of runs are, and what to type to run the rest."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lopa_dist.decode.config import text_settings
from lopa_dist.jobs.commands.go_on import go_on, shards_again, spans, words
from lopa_dist.jobs.folder.journal import difference
from lopa_dist.jobs.folder.lookahead import text_model
from lopa_dist.jobs.folder.sweep_points import without_run
from lopa_dist.jobs.show.report import duration, read_report
from lopa_dist.jobs.show.run_state import LOGS, RunState, last_line, runs_below
from lopa_dist.overrides import typed

LONGEST = 10_000  # the most characters of a line
LEAST_WIDTH = 80
INVALID = 5  # number of the column of answers that do not have their format
MOST = 20  # the most rows that are all shown; if there are more, only those that are not complete


def status(folders: Sequence[Path], console: Console) -> None:
    """Print a table of the runs in `folders`, then what is missing and the commands that run it.

    Raises:
        ValueError: a folder has no run, is damaged or cannot be read; the runs of the other folders are printed first.
    """
    runs, wrong = list[RunState](), list[str]()
    for folder in folders:
        try:
            runs += runs_below(folder, wrong)
        except (ValueError, OSError) as error:
            wrong.append(str(error))
    arrays: dict[Path | None, list[RunState]] = {}
    for run in runs:
        arrays.setdefault(run.folder.parent if run.shard[1] > 1 else None, []).append(run)
    rows = [row for place, members in arrays.items() for row in rows_of(members, missing(members) if place else [])]
    if len(rows) > MOST:
        rows = [row for row in rows if row[1] != "complete"]
    if rows:
        table = Table()
        formats = any(run.invalid for run in runs)  # else the column is left out
        names = ("run", "state", "done", "open", "errors", "not of format", "tokens/s", "time", "left")
        rows = [row if formats else row[:INVALID] + row[INVALID + 1 :] for row in rows]
        for name in names if formats else names[:INVALID] + names[INVALID + 1 :]:
            table.add_column(name, justify="left" if name in ("run", "state") else "right", overflow="fold")
        for row in rows:
            table.add_row(*map(escape, row))
        console.width = max(console.width, LEAST_WIDTH)  # a narrow terminal breaks lines, but shows all
        if not console.is_terminal:  # in a file, lines are as long as they need to be
            wide = console.measure(table, options=console.options.update(max_width=LONGEST))
            console.width = max(console.width, wide.maximum)
        console.print(table)
    for place, members in arrays.items():
        for line in array_in_words(place, members) if place else runs_in_words(members):
            console.print(line, soft_wrap=True, markup=False, highlight=False)
    for line in filter(None, map(sweep_in_words, folders)):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    if wrong:
        raise ValueError("\n".join(wrong))


def missing(runs: Sequence[RunState]) -> list[int]:
    """Return the numbers of an array's shards that have no run."""
    return sorted(set(range(runs[0].shard[1])) - {run.shard[0] for run in runs})


def rows_of(runs: Sequence[RunState], absent: Sequence[int]) -> list[tuple[str, ...]]:
    """Return a row for each run, and one for each shard in `absent`, which has no run."""
    rows: list[tuple[str, ...]] = []
    for run in runs:
        numbers = (run.done, run.open, run.errors, run.invalid)
        counts = ["?" if count is None else f"{count:,}" for count in numbers]
        speed = f"{run.tokens_per_s:,.0f}" if run.tokens_per_s else "-"
        left = "-" if run.left_s is None or run.state != "running" else duration(run.left_s)
        took = duration(run.seconds) if run.seconds else "-"
        rows.append((f"{run.folder}", run.state, *counts, speed, took, left))
    nothing = ("missing", "0", "?", "-", "-", "-", "-", "-")
    return [*rows, *((f"{runs[0].folder.parent}: shard {shard}", *nothing) for shard in absent)]


def runs_in_words(runs: Sequence[RunState]) -> list[str]:
    """Return lines on runs of whole inputs: how many are complete, and what to type for the others."""
    stopped = [run for run in runs if run.state in ("stopped", "open")]
    complete = sum(run.state == "complete" for run in runs)
    lines = [f"{complete} of {len(runs)} runs are complete"] if len(runs) > 1 else []
    for run in stopped:
        ends = f"the log of {run.folder} ends with: {last}\n" if (last := last_line(run.folder)) else ""
        lines.append(
            f"{ends}{run.folder} goes on{unless_queued([run])} with:\n{go_on(run)}{not_repeated([run])}{piped(run)}"
        )
    lines += [
        f"{run.folder} is complete, but task.output={run.unwritten} is not there; this writes it:\n"
        f"{go_on(run)}"
        for run in runs if run.unwritten
    ]  # fmt: skip
    lines += [
        f"{run.folder} is complete, but {run.unjudged:,} answers could not be judged; this tries again:\n{go_on(run)}"
        for run in runs if run.unjudged
    ]  # fmt: skip
    waiting = [run.folder for run in runs if run.state == "not begun"]
    return lines + [f"{folder} has not begun: if squeue does not list it, {LOGS} in it says why" for folder in waiting]


def sweep_in_words(folder: Path) -> str:
    """Return which points of a sweep have no run, and how to run them; empty if all have one."""
    names = without_run(folder)
    if not names:
        return ""
    more = f", and {len(names) - MOST} more" if len(names) > MOST else ""
    those = "1 point of the sweep in {} has" if len(names) == 1 else f"{len(names)} points of the sweep in {{}} have"
    return (
        f"{those.format(folder)} no run yet (not begun, or failed before): {'; '.join(names[:MOST])}{more}\n"
        "Unless the sweep still runs or squeue lists them, the sweep's command again runs what is missing, with "
        f"FOLDER={quote(str(folder))} (launch/sweep.sh) or {typed('hydra.sweep.dir', folder)}"
    )


def not_repeated(runs: Sequence[RunState]) -> str:
    """Return a note on what a command for Slurm repeats and what it does not; empty for jobs without Slurm."""
    if not any(run.record and run.record.submission and run.record.submission.options for run in runs):
        return ""
    return (
        "\n(with the job's time, cores, memory, partition, account and QOS; add what else sbatch was given, such as "
        "--exclusive, --constraint or %8, and the environment, such as RESTARTS, SCRATCH or OMP_NUM_THREADS)"
    )


def piped(run: RunState) -> str:
    """Return a note that a run reads standard input; empty for others."""
    return "\n(pipe the same text into it again)" if "task.input=-" in words(run) else ""


def unless_queued(runs: Sequence[RunState]) -> str:
    """Return a warning not to start a job that still waits in Slurm's queue; empty for jobs without Slurm."""
    return ", unless squeue lists it," if any(run.record and run.record.submission for run in runs) else ""


def array_in_words(folder: Path, runs: Sequence[RunState]) -> list[str]:
    """Return lines on an array: how much is done, and what to type next."""
    done, errors = sum(run.done for run in runs), sum(run.errors for run in runs)
    known = [run.expected for run in runs if run.expected is not None]
    expected = f" of {sum(known):,}" if len(known) == runs[0].shard[1] else ""
    failed = f", {errors:,} of them with errors" if errors else ""
    first, *others = shards_in_words(runs)
    lines = [f"{folder}: {first}; {done:,}{expected} requests are done{failed}", *others]
    if not others and (older := of_another_input(runs)):
        again = f"{shards_again(runs, older)}{not_repeated(runs)}"
        which = in_words(set(older), "has", "have")
        lines.append(f"{which} answers to an earlier input, which cannot be merged; run the rest of it with:\n{again}")
    elif not others and (differ := other_settings(runs)):
        again = "run it again with the last one's settings and job.resume=new"
        lines.append(f"{differ}. This cannot be merged: {again}")
    elif not others:
        lines.append(
            f"merged: {folder / 'results.jsonl'}" if merged(folder, runs) else f"lopa-dist merge {quote(str(folder))}"
        )
    return lines


def settings(report: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that all shards of a job have in common."""
    task = {k: v for k, v in report["task"].items() if k != "shard"}
    # the same path may have other weights, and dtype=auto means another precision on another device
    return {key: report.get(key) for key in ("decode", "model", "weights", "seed")} | {"task": task}


def changes_between(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Return which settings of two shards' reports differ, without settings that the version of either did not have."""
    one, other = settings(first), settings(second)
    for of in (one, other):
        of["decode"] = text_settings(of["decode"])
        of["model"] = text_model(of["model"])
    for key in one:
        if isinstance(one[key], dict) and isinstance(other[key], dict):
            common = one[key].keys() & other[key].keys()
            one[key], other[key] = ({k: v for k, v in of[key].items() if k in common} for of in (one, other))
    return difference(one, other)


def by_shard(runs: Sequence[RunState]) -> tuple[dict[int, dict[str, Any]], dict[str, Any]]:
    """Return the reports of a complete array by shard, and the one that was made last."""
    reports = {run.shard[0]: read_report(run.folder / "report.json") for run in runs}
    return reports, max(reports.values(), key=lambda report: report.get("made", {}).get("date", ""))


def other_settings(runs: Sequence[RunState]) -> str:
    """Return in words which shards of a complete array differ in settings from the one made last, and how."""
    reports, last = by_shard(runs)
    changes = {n: changes_between(report, last) for n, report in reports.items()}
    others = sorted(n for n, changed in changes.items() if changed)
    return f"{in_words(set(others), 'has', 'have')} other settings: {'; '.join(changes[others[0]])}" if others else ""


def of_another_input(runs: Sequence[RunState]) -> list[int]:
    """Return the shards of a complete array whose input differs from that of the shard made last."""
    reports, last = by_shard(runs)
    return sorted(n for n, report in reports.items() if report.get("whole_input") != last.get("whole_input"))


def shards_in_words(runs: Sequence[RunState]) -> list[str]:
    """Return lines on an array's shards: how many are complete, which are not, and the command that runs the rest."""
    shards, left = runs[0].shard[1], set(range(runs[0].shard[1]))
    by_state: dict[str, set[int]] = {}
    for states in (("complete",), ("running",), ("not begun",), ("stopped", "open")):  # of several runs, the first
        by_state[states[0]] = left & {run.shard[0] for run in runs if run.state in states}
        left -= by_state[states[0]]
    lines = [f"{len(by_state['complete'])} of {shards} shards are complete"]
    if by_state["running"]:
        lines.append(in_words(by_state["running"], "runs", "run"))
    kinds = (
        (left, "is missing", "are missing"),
        (by_state["not begun"], "has not begun", "have not begun"),
        (by_state["stopped"], "was stopped", "were stopped"),
    )
    if parts := [in_words(*kind) for kind in kinds if kind[0]]:
        again = shards_again(runs, sorted(left | by_state["not begun"] | by_state["stopped"]))
        lines.append(f"{' and '.join(parts)}; run the rest{unless_queued(runs)} with:\n{again}{not_repeated(runs)}")
    return lines


def in_words(shards: Collection[int], one: str, more: str) -> str:
    """Return the shards as the subject of a sentence that ends in `one` or `more`: ``shards 1,3-5 are missing``."""
    return f"shard {spans([*shards])} {one}" if len(shards) == 1 else f"shards {spans([*shards])} {more}"


def merged(folder: Path, runs: Sequence[RunState]) -> bool:
    """Return whether `folder` has merged results that are no older than those of the shards."""
    report = folder / "report.json"
    if not report.exists() or read_report(report).get("shards") != len(runs):
        return False
    return report.stat().st_mtime >= max((run.folder / "report.json").stat().st_mtime for run in runs)
