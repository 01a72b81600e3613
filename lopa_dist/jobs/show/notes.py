"""What a reader must know of some runs before comparing them, in sentences below the table."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from lopa_dist.jobs.setup.other_programs import KEPT_BUSY
from lopa_dist.jobs.show.paired import Paired
from lopa_dist.jobs.show.report import has_samples, judged, problems
from lopa_dist.jobs.show.run_page import stopped
from lopa_dist.jobs.show.seed_groups import SeedGroup, inputs_of
from lopa_dist.own_code import SOURCE_OF

OF_JUDGES = f"{SOURCE_OF}task", f"{SOURCE_OF}task.score"
BUSY = 1.5  # load per core above which a run's times are not reliable
SCATTER = 1.2  # a note is added where the fastest run of a point is more than this many times as fast as the slowest

Numbered = Sequence[tuple[str, dict[str, Any]]]
"""What each point is called, and its report."""


def notes_of(groups: Sequence[SeedGroup], pairs: Sequence[Paired | None], called: Sequence[str]) -> list[str]:
    """Return notes that a reader must know before comparing the points.

    Args:
        groups: the points.
        pairs: each point's comparison with a baseline, if there is one.
        called: how each point is called.
    """
    numbered = list(zip(called, (group.report for group in groups), strict=True))
    counts = {number: pair.problems for number, pair in zip(called, pairs, strict=True) if pair}
    return [
        *of_problems(numbered, counts),
        *of_seeds(numbered, bool(counts)),
        *of_speeds(numbered),
        *of_own_code(numbered),
        *of_input(numbered, bool(counts)),
        *of_machines(numbered),
        *of_warnings(numbered),
    ]


def of_problems(numbered: Numbered, counts: dict[str, int]) -> Iterator[str]:
    """Yield notes on which problems count; `counts` says over how many a difference from the baseline is."""
    for number, report in numbered:
        if part := stopped(report):
            yield f"Run {number} was stopped: {part}."
        if "accuracy" in report and (missing := report["requests"] - judged(report)):
            failed = f" ({report['errors']} ended with an error)" if report.get("errors") else ""
            yield f"The accuracy of run {number} leaves out {missing} of its {report['requests']} requests{failed}."
    if counts and len({*counts.values(), *(problems(r) for _, r in numbered if "accuracy" in r)}) > 1:
        words = ", ".join(f"run {number}: {count}" for number, count in counts.items())
        yield f"Differences are over the problems that both have judged ({words})."
    if any(has_samples(report) and "accuracy" in report for _, report in numbered):
        yield "Several samples of a prompt count as one problem, whose score is the share of samples that are right."


def of_seeds(numbered: Numbered, compared: bool) -> Iterator[str]:
    """Yield notes on points that are several runs; `compared`: whether there are differences from a baseline."""
    if any(report.get("seeds", 1) > 1 and "accuracy" in report for _, report in numbered):
        words = " p is that of the sign test of the problems' means over seeds." if compared else ""
        spread = " (sd: their standard deviation)" if any("accuracy_sd" in report for _, report in numbered) else ""
        yield (
            f"A run with several seeds has the mean of the seeds' accuracies{spread}, and an interval as wide as one "
            f"seed's.{words}"
        )
    for number, report in numbered:
        if counted := report.get("seeds_by_stream"):
            each = ", ".join(f"{stream}: {many}" for stream, many in counted.items())
            yield (
                f"Run {number} does not have every seed on every stream of problems, and so no sd (seeds by "
                f"task.problem_seed: {each})."
            )


def of_speeds(numbered: Numbered) -> Iterator[str]:
    """Yield notes on answers that are cut, and on what makes times or counts uncertain."""
    if cut := [f"run {n}: {r['cut'] / (r['requests'] - r['errors']):.1%}" for n, r in numbered if r.get("cut")]:
        yield f"Answers that are cut at their limit of tokens: {', '.join(cut)}."
    ranges = [(number, *report.get("tokens_per_s_range", (1, 1))) for number, report in numbered]
    if wide := [f"{number} ({low:.0f} to {high:.0f})" for number, low, high in ranges if high > SCATTER * low]:
        runs = ", ".join(wide)
        yield f"Tokens per second differ between runs of one row, probably because of other work: run {runs}."
    if auto := [number for number, r in numbered if r["decode"].get("drafts") == "auto" and "masks" not in r]:
        some = "all runs" if len(auto) == len(numbered) else f"run {', '.join(auto)}"
        yield (
            f"With decode.drafts=auto ({some}), tokens per forward and rows per token depend on the machine and its "
            "load: they differ when such a run is repeated, but its texts do not."
        )
    if busy := [f"{number} (load {load:g}, {cores} cores)" for number, r in numbered for load, cores in busy_at(r)]:
        yield f"Other programs ran when these runs began, so their times are not reliable: {', '.join(busy)}."


def of_warnings(numbered: Numbered) -> Iterator[str]:
    """Yield the warnings of the runs, each once, with the runs that have it."""
    warned: dict[str, dict[str, str]] = {}  # by kind of warning, and by run
    for number, report in numbered:
        for warning in report.get("warnings", []):
            kind = re.sub(r"[\d.]+", "", warning) if warning.startswith(KEPT_BUSY) else warning
            warned.setdefault(kind, {}).setdefault(number, warning)
    for of_kind in warned.values():
        some = "All runs" if len(of_kind) == len(numbered) else f"Run {', '.join(of_kind)}"
        first, *others = dict.fromkeys(of_kind.values())
        alike = f" (run {next(iter(of_kind))}; the others alike)" if others else ""
        yield f"{some}: {first.rstrip('.')}{alike}."


def busy_at(report: dict[str, Any]) -> list[tuple[float, int]]:
    """Return the load and the number of cores if a run began on a CPU that was too busy (`BUSY`); else nothing.

    A load is that of the whole machine, and counts the jobs that just ended. A run that has measured how many of its
    own cores other programs kept busy has a warning instead if they were too many.
    """
    made = report.get("made") or {}
    if "others" in made:
        return []
    cores = re.search(r"(\d+) cores$", made.get("device") or "")
    load = made.get("load") or 0.0
    return [(load, int(cores[1]))] if cores and load > BUSY * int(cores[1]) else []


def of_own_code(numbered: Numbered) -> Iterator[str]:
    """Yield notes on runs that were judged by other rules, or whose code of the user's own was edited between them."""
    rules: dict[Any, set[Any]] = {}
    hashes: dict[tuple[str, str], set[str]] = {}
    for _, report in numbered:
        own = report.get("own_code") or {}
        known = {tuple(map(own.get, OF_JUDGES))} if "own_code" in report else set()  # not in an older version's report
        rules.setdefault(report["task"].get("score"), set()).update(known)
        for source in own.keys() - {*OF_JUDGES}:
            section, _, key = source.removeprefix(SOURCE_OF).partition(".")
            file = str(report.get(section, {}).get(key)).rpartition(":")[0]
            hashes.setdefault((source, file), set()).add(own[source])
    judged_alike = len(rules) == 1 and all(len(versions) < 2 for versions in rules.values())
    if not judged_alike and any("accuracy" in report for _, report in numbered):
        yield (
            "Not all runs were judged by the same rule (task.score, or a task's own), so their accuracies are not "
            "comparable."
        )
    for source in sorted({source for (source, _), versions in hashes.items() if len(versions) > 1}):
        yield f"Not all runs had the same code: {source} changed between them."


def of_input(numbered: Numbered, compared: bool) -> Iterator[str]:
    """Yield notes on runs that were not asked the same; `compared`: whether there are differences from a baseline."""
    inputs: dict[Any, set[str]] = {}  # by stream of problems
    key = "whole_prompts" if all("whole_prompts" in report for _, report in numbered) else "whole_input"
    for _, report in numbered:
        inputs.setdefault(report["task"].get("problem_seed"), set()).add(str(report.get(key)))
    if any(len(of_stream - {"None"}) > 1 for of_stream in inputs.values()):
        words = "only runs with the baseline's input are compared with it" if compared else "compare them with care"
        yield f"Not all runs had the same input: {words}."
    asked = [(number, inputs_of(report, "whole_input").keys()) for number, report in numbered]
    if any(streams != asked[0][1] for _, streams in asked):
        which = ", ".join(f"{number}: {', '.join(streams)}" for number, streams in asked)
        yield f"Not all runs were asked the same problems, by their task.problem_seed ({which})."


def of_machines(numbered: Numbered) -> Iterator[str]:
    """Yield notes on runs that were made on other devices, or by other code of this package."""
    devices: dict[str, list[str]] = {}
    codes = set[str]()
    for name, report in numbered:
        made = report.get("made") or {}
        codes.update(filter(None, made.get("code", "").split(", ")))
        if device := made.get("device"):
            devices.setdefault(device, []).append(name)
    if len(devices) > 1:
        which = "; ".join(f"run {', '.join(names)}: {device}" for device, names in devices.items())
        yield f"Not all runs were made on the same device, so their times are not comparable ({which})."
    if len(codes) > 1:
        yield "Not all runs were made by the same code: files of lopa_dist changed between them."
