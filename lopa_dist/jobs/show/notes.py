"""What a reader must know of some runs before comparing them, in sentences below the table."""

from __future__ import annotations

import re
from collections.abc import Sequence
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


def notes_of(groups: Sequence[SeedGroup], pairs: Sequence[Paired | None], called: Sequence[str]) -> list[str]:
    """Return notes that a reader must know before comparing the points.

    Args:
        groups: the points.
        pairs: each point's comparison with a baseline, if there is one.
        called: how each point is called.
    """
    notes, numbered = [], list(zip(called, (group.report for group in groups), strict=True))
    for number, report in numbered:
        if part := stopped(report):
            notes.append(f"Run {number} was stopped: {part}.")
        if "accuracy" in report and (missing := report["requests"] - judged(report)):
            failed = f" ({report['errors']} ended with an error)" if report.get("errors") else ""
            notes.append(
                f"The accuracy of run {number} leaves out {missing} of its {report['requests']} requests{failed}."
            )
    counts = {number: pair.problems for number, pair in zip(called, pairs, strict=True) if pair}
    if counts and len({*counts.values(), *(problems(r) for _, r in numbered if "accuracy" in r)}) > 1:
        words = ", ".join(f"run {number}: {count}" for number, count in counts.items())
        notes.append(f"Differences are over the problems that both have judged ({words}).")
    if any(has_samples(report) and "accuracy" in report for _, report in numbered):
        notes.append(
            "Several samples of a prompt count as one problem, whose score is the share of samples that are right."
        )
    if any(report.get("seeds", 1) > 1 and "accuracy" in report for _, report in numbered):
        words = " p is that of the sign test of the problems' means over seeds." if counts else ""
        spread = " (sd: their standard deviation)" if any("accuracy_sd" in report for _, report in numbered) else ""
        notes.append(
            f"A run with several seeds has the mean of the seeds' accuracies{spread}, and an interval as wide as one "
            f"seed's.{words}"
        )
    for number, report in numbered:
        if counted := report.get("seeds_by_stream"):
            each = ", ".join(f"{stream}: {many}" for stream, many in counted.items())
            notes.append(
                f"Run {number} does not have every seed on every stream of problems, and so no sd (seeds by "
                f"task.problem_seed: {each})."
            )
    if cut := [f"run {n}: {r['cut'] / (r['requests'] - r['errors']):.1%}" for n, r in numbered if r.get("cut")]:
        notes.append(f"Answers that are cut at their limit of tokens: {', '.join(cut)}.")
    ranges = [(number, *report.get("tokens_per_s_range", (1, 1))) for number, report in numbered]
    if wide := [f"{number} ({low:.0f} to {high:.0f})" for number, low, high in ranges if high > SCATTER * low]:
        notes.append(
            f"Tokens per second differ between runs of one row, probably because of other work: run {', '.join(wide)}."
        )
    if auto := [number for number, r in numbered if r["decode"].get("drafts") == "auto" and "masks" not in r]:
        some = "all runs" if len(auto) == len(groups) else f"run {', '.join(auto)}"
        notes.append(
            f"With decode.drafts=auto ({some}), tokens per forward and rows per token depend on the machine and its "
            "load: they differ when such a run is repeated, but its texts do not."
        )
    if busy := [f"{number} (load {load:g}, {cores} cores)" for number, r in numbered for load, cores in busy_at(r)]:
        notes.append(f"Other programs ran when these runs began, so their times are not reliable: {', '.join(busy)}.")
    notes += unlike(groups, called, bool(counts))
    warned: dict[str, dict[str, str]] = {}  # by kind of warning, and by run
    for number, report in numbered:
        for warning in report.get("warnings", []):
            kind = re.sub(r"[\d.]+", "", warning) if warning.startswith(KEPT_BUSY) else warning
            of_kind = warned.setdefault(kind, {})
            of_kind.setdefault(number, warning)
    for of_kind in warned.values():
        some = "All runs" if len(of_kind) == len(groups) else f"Run {', '.join(of_kind)}"
        first, *others = dict.fromkeys(of_kind.values())
        alike = f" (run {next(iter(of_kind))}; the others alike)" if others else ""
        notes.append(f"{some}: {first.rstrip('.')}{alike}.")
    return notes


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


def unlike(groups: Sequence[SeedGroup], called: Sequence[str], compared: bool) -> list[str]:
    """Return notes on how runs differ besides their decoding: in rules of judging, code, or input.

    Args:
        groups: the points.
        called: how each point is called.
        compared: whether some are compared with a baseline problem by problem.
    """
    notes = []
    reports = [group.report for group in groups]
    own = [report.get("own_code") or {} for report in reports]
    rules: dict[Any, set[Any]] = {}
    for report, of in zip(reports, own, strict=True):
        known = {tuple(map(of.get, OF_JUDGES))} if "own_code" in report else set()  # not in an older version's report
        rules.setdefault(report["task"].get("score"), set()).update(known)
    if (len(rules) > 1 or any(len(hashes) > 1 for hashes in rules.values())) and any(
        "accuracy" in report for report in reports
    ):
        notes.append(
            "Not all runs were judged by the same rule (task.score, or a task's own), so their accuracies are not "
            "comparable."
        )
    hashes: dict[tuple[str, str], set[str]] = {}
    for report, of in zip(reports, own, strict=True):
        for source in of.keys() - {*OF_JUDGES}:
            section, _, key = source.removeprefix(SOURCE_OF).partition(".")
            file = str(report.get(section, {}).get(key)).rpartition(":")[0]
            hashes.setdefault((source, file), set()).add(of[source])
    edited = sorted({source for (source, _), found in hashes.items() if len(found) > 1})
    notes += [f"Not all runs had the same code: {source} changed between them." for source in edited]
    tasks: dict[Any, set[Any]] = {}
    key = "whole_prompts" if all("whole_prompts" in report for report in reports) else "whole_input"
    for report in reports:
        tasks.setdefault(report["task"].get("problem_seed"), set()).add(str(report.get(key)))
    if any(len(inputs - {"None"}) > 1 for inputs in tasks.values()):
        words = "differences are of those alone that have the baseline's" if compared else "compare them with care"
        notes.append(f"Not all runs had the same input: {words}.")
    asked = [inputs_of(report, "whole_input").keys() for report in reports]
    if any(streams != asked[0] for streams in asked):
        which = ", ".join(f"{name}: {', '.join(streams)}" for name, streams in zip(called, asked, strict=True))
        notes.append(f"Not all runs were asked the same problems, by their task.problem_seed ({which}).")
    devices: dict[str, list[str]] = {}
    for name, report in zip(called, reports, strict=True):
        if device := (report.get("made") or {}).get("device"):
            devices.setdefault(device, []).append(name)
    if len(devices) > 1:
        which = "; ".join(f"run {', '.join(names)}: {device}" for device, names in devices.items())
        notes.append(f"Not all runs were made on the same device, so their times are not comparable ({which}).")
    codes = {code for report in reports for code in (report.get("made") or {}).get("code", "").split(", ")} - {""}
    if len(codes) > 1:
        notes.append("Not all runs were made by the same code: files of lopa_dist changed between them.")
    return notes
