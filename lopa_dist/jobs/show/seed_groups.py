"""Runs below a folder as points of a comparison: runs that differ only in seeds are one. Unfinished runs are listed."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from lopa_dist.checks import UserError
from lopa_dist.config import Config
from lopa_dist.jobs.setup.settings import shown
from lopa_dist.jobs.show.equal_texts import EqualTexts, counterparts, equal_texts
from lopa_dist.jobs.show.made_on import made_together
from lopa_dist.jobs.show.paired import Paired, Verdicts, compared, verdicts
from lopa_dist.jobs.show.report import judged, problems, prompts, read_report, typed_settings, why_no_results
from lopa_dist.models.files import without_tensors

log = logging.getLogger("lopa_dist")
SEEDS = ("seed", "task.problem_seed")  # runs that differ in these only are one point
RESULTS = "requests", "errors", "completion_tokens", "accuracy"  # equal in reports of runs with the same texts
NEEDED = {"task", "model", "decode", "tpf", "tokens_per_s", "requests"}

Unfinished = tuple[str, dict[str, str]]
"""The name of the folder of a run without a report, and the settings that were typed for it."""


@dataclass(frozen=True)
class SeedGroup:
    """A point of a comparison: a run, or runs that differ only in their seeds (`SEEDS`).

    Attributes:
        name: of the run folder; for several runs, their common name without seeds, or else all names.
        report: the run's; for several runs, the first one's with the figures of all, and with `seeds` and `streams`:
            how many seeds and streams of problems there are. If not every stream has every seed, `seeds_by_stream`
            says how many each has; otherwise `accuracy_sd` is the standard deviation of the seeds' accuracies.
        folders: of the runs.
    """

    name: str
    report: dict[str, Any]
    folders: list[Path]


def below(folder: Path, name: str) -> list[Path]:
    """Return all files of a name in a folder and below it; links to folders are followed."""
    found, seen = [], set()
    for place, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:  # a link to where we have been
            folders.clear()
        elif name in files:
            found.append(Path(place, name))
        seen.add(real)
    return found


def load_reports(
    folder: Path, among: Sequence[Path] = (), damaged: list[str] | None = None
) -> list[tuple[str, dict[str, Any]]]:
    """Return all reports below a folder, with the names of their run folders.

    Runs inside another run's folder are left out: they are shards that were merged into it.

    Args:
        folder: to which the names are relative.
        among: folders in it; only reports in or below these are returned; none: all.
        damaged: gets a message on each file that is no whole report of a job; None: the first one raises an error.

    Raises:
        ValueError: there are none.
    """
    found: set[Path] = set()
    for place in among or [folder]:
        files = below(place, "report.json")
        if not files:
            raise ValueError(
                why_no_results(place, "no report.json in it or below it; name a run or sweep folder", below=True)
            )
        found.update(files)
    runs = {file.parent for file in found}
    files = sorted(file for file in found if runs.isdisjoint(file.parent.parents))
    wrong, reports = list[str](), list[tuple[str, dict[str, Any]]]()
    for file in files:
        try:
            report = read_report(file)
            if not set(report) >= NEEDED:
                raise ValueError(f"{file} is not the report of a job; name a folder with jobs only")
            reports.append((str(file.parent.relative_to(folder)), report))
        except ValueError as error:
            wrong.append(str(error))
    if wrong and (damaged is None or not reports):
        raise ValueError("\n".join(wrong))
    if damaged is not None:
        damaged += wrong
    return reports


def unfinished(folder: Path, among: Sequence[Path] = ()) -> list[Unfinished]:
    """Return the run folders without a report: jobs that failed, or still run.

    The arguments are those of `load_reports`.
    """
    runs = []
    typed_in = {file for place in among or [folder] for file in below(place, "overrides.yaml")}
    for run in sorted(file.parent.parent for file in typed_in if file.parent.name == ".hydra"):
        parents = [parent for parent in (run, *run.parents) if parent == folder or folder in parent.parents]
        if not any((parent / "report.json").exists() for parent in parents):
            runs.append((str(run.relative_to(folder)), typed_settings(run)))
    return runs


@cache
def defaults() -> dict[str, Any]:
    """Return all settings as they are if none is given."""
    return asdict(Config())


def settings_by_name(report: dict[str, Any]) -> dict[str, Any]:
    """Return the settings on which a run's texts and speed depend, by name; decode settings have no section there.

    Those that the run's version did not have are as if they were left out.
    """
    sections = {"": "decode", "model.": "model", "task.": "task", "engine.": "engine", "parallel.": "parallel"}
    values = {name: defaults()[name] | report.get(name, {}) for name in sections.values()}
    settings = {prefix + key: value for prefix, name in sections.items() for key, value in values[name].items()}
    return settings | {"seed": report.get("seed"), "ranks": report.get("world", {}).get("size")}


def grouped(folder: Path, named: Sequence[tuple[str, dict[str, Any]]]) -> list[SeedGroup]:
    """Return the points of a comparison, sorted by tokens per forward; runs that differ only in `SEEDS` are one point.

    Runs between which the weights, the user's own code or the input changed are different points. So are runs that
    differ in nothing, unless there are other seeds beside them: then such runs count once (`without_repeats`).

    Another `seed` asks no new problems: the accuracy is the mean, with the confidence interval of a single run.
    Another `task.problem_seed` does: the accuracy and its interval are those of all problems.
    """
    points: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    inputs: dict[str, Any] = {}  # by settings and stream of problems: the input of the first such run
    known = [text for _, report in named for text in revisions_of(report).values()]
    for name, report in named:
        of_files: dict[str, Any] = {key: report.get(key) for key in ("weights", "own_code")}  # which may change
        if of_files["weights"]:
            full = {key: full_name(text, known) for key, text in revisions_of(report).items()}
            of_files["weights"] = of_files["weights"] | full
        key = json.dumps(settings_by_name(report) | dict.fromkeys(SEEDS) | of_files, sort_keys=True)
        given = report.get("whole_input")
        if inputs.setdefault(f"{key} {report['task'].get('problem_seed')}", given) != given:
            key += str(given)
        points.setdefault(key, []).append((name, report))
    groups = []
    for runs in map(without_repeats, points.values()):
        if len(runs) > 1 and len({seed_values(report) for _, report in runs}) == len(runs):
            names = [",".join(p for p in name.split(",") if p.split("=")[0] not in SEEDS) for name, _ in runs]
            name = names[0] if len(set(names)) == 1 and names[0] else " + ".join(name for name, _ in runs)
            groups.append(SeedGroup(name, pooled_report([r for _, r in runs]), [folder / name for name, _ in runs]))
        else:
            groups += [SeedGroup(name, report, [folder / name]) for name, report in runs]
    return sorted(groups, key=lambda point: point.report["tpf"])


def revisions_of(report: dict[str, Any]) -> dict[str, str]:
    """Return the revisions of a report's checkpoint and adapter."""
    weights = report.get("weights") or {}
    return {key: weights[key] for key in ("revision", "lora") if isinstance(weights.get(key), str)}


def full_name(revision: str, known: Sequence[str]) -> str:
    """Return the only one of the `known` revisions that is the longer form of `revision`; else `revision` unchanged."""
    longer = {one for one in known if one != revision and without_tensors(one) == revision}
    return longer.pop() if len(longer) == 1 else revision


def without_repeats(runs: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    """Return the named reports of one setting without those that repeat another, with the same seeds and results.

    If all have the same seeds, they measure the time again, and all are kept. If repeats have other results, all are
    kept, too, with a warning. A run that is left out is logged.
    """
    first: dict[tuple[Any, ...], tuple[str, dict[str, Any]]] = {}
    repeats = [
        (first[seed_values(run[1])], run) for run in runs if first.setdefault(seed_values(run[1]), run) is not run
    ]
    if len(first) == 1 or not repeats:
        return runs
    for (name, report), (other, repeated) in repeats:
        if any(report.get(key) != repeated.get(key) for key in RESULTS):
            log.warning(
                "runs that differ only in their seeds are not one row, because %s and %s have the same settings and "
                "seeds, but other results",
                name, other,
            )  # fmt: skip
            return runs
    for (name, _), (other, _) in repeats:
        log.warning("%s is left out: it repeats %s, with the same settings, seeds and results", other, name)
    return list(first.values())


def seed_values(report: dict[str, Any]) -> tuple[Any, ...]:
    """Return the values of a run's `SEEDS`."""
    return tuple(settings_by_name(report).get(key) for key in SEEDS)


def pooled_report(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the first report with the figures of all: rates of all together, means over seeds, sums over streams."""
    first = reports[0]
    streams: dict[Any, list[dict[str, Any]]] = {}
    for report in reports:
        streams.setdefault(report["task"].get("problem_seed"), []).append(report)
    pooled: dict[str, Any] = {
        key: fmean(report[key] for report in reports)
        for key in ("tpf", "rows_per_token")
        if all(key in report for report in reports)
    }
    if all(report.get("completion_tokens") for report in reports):
        tokens, forwards, rows = (
            sum(report.get(key) or 0 for report in reports) for key in ("completion_tokens", "forwards", "rows")
        )
        pooled |= {"tpf": tokens / forwards}
        if all("rows" in report for report in reports):  # an earlier version did not count them
            pooled |= {"rows_per_token": rows / tokens}
    pooled |= {key: sum(runs[0][key] for runs in streams.values()) for key in ("requests", "errors") if key in first}
    pooled["prompts"] = sum(prompts(runs[0]) for runs in streams.values())
    if all(report.get("cut") is not None for report in reports):
        pooled["cut"] = sum(fmean(report["cut"] for report in runs) for runs in streams.values())
    speeds = [report["tokens_per_s"]["job"] for report in reports]
    if all(report.get("decode_s") for report in reports):
        job = sum(r["tokens_per_s"]["job"] * r["decode_s"] for r in reports) / sum(r["decode_s"] for r in reports)
    else:
        job = fmean(speeds)
    pooled["tokens_per_s"] = first["tokens_per_s"] | {"job": job}
    if all(report.get("made") for report in reports):
        pooled["made"] = made_together([report["made"] for report in reports])
    pooled["tokens_per_s_range"] = min(speeds), max(speeds)
    pooled["warnings"] = list(dict.fromkeys(warning for report in reports for warning in report.get("warnings", [])))
    used = list(dict.fromkeys(r.get("seed") for r in reports))
    pooled |= {"seed": ", ".join(map(str, used)) if len(used) > 1 else used[0], "streams": len(streams)}
    pooled["seeds"] = max(map(len, streams.values()))
    by_seed: dict[Any, list[dict[str, Any]]] = {}
    for report in reports:
        by_seed.setdefault(report.get("seed"), []).append(report)
    every = all(len(runs) == len(streams) for runs in by_seed.values())
    if not every:
        pooled["seeds_by_stream"] = {stream_of(runs[0]): len(runs) for runs in streams.values()}
    if len(streams) > 1:
        for key in ("whole_input", "whole_prompts"):
            pooled[key] = {stream_of(runs[0]): runs[0].get(key) for runs in streams.values()}
        pooled["task"] = first["task"] | {"problem_seed": ", ".join(map(str, streams))}
    if all("accuracy" in report for report in reports):
        counts = [judged(runs[0]) for runs in streams.values()]
        means = [fmean(report["accuracy"] for report in runs) for runs in streams.values()]
        pooled |= {"judged": sum(counts), "problems": sum(problems(runs[0]) for runs in streams.values())}
        pooled["accuracy"] = sum(mean * n for mean, n in zip(means, counts, strict=True)) / max(1, sum(counts))
        if every and len(by_seed) > 1:
            pooled["accuracy_sd"] = stdev(
                sum(r["accuracy"] * judged(r) for r in runs) / max(1, sum(map(judged, runs)))
                for runs in by_seed.values()
            )
    return first | pooled


def find_baseline(groups: Sequence[SeedGroup], asked: str) -> SeedGroup:
    """Return the only point that is called `asked`, or has a run of this name; else the only one with these settings.

    Settings are written as ``decode.drafts=0,tau_conf=0.9``.

    Raises:
        UserError: there is no such point, or there are several.
    """
    matching = baselines(groups, asked)
    if len(matching) == 1:
        return matching[0]
    if len(groups) == 1:
        raise UserError(f"--baseline {asked}: there is only one run to compare; name the folders of several")
    names = ", ".join(group.name for group in matching or groups)
    many = f"{len(matching)} runs have these settings" if matching else "no run is called so or has these settings"
    raise UserError(f"--baseline {asked}: {many}; there are {names}")


def baselines(groups: Sequence[SeedGroup], asked: str) -> list[SeedGroup]:
    """Return the points that are called `asked`, or have a run of this name; else those with these settings."""
    named = [group for group in groups if asked in (group.name, *(folder.name for folder in group.folders))]
    wanted = dict(part.removeprefix("decode.").split("=", 1) for part in asked.split(",") if "=" in part)
    return named or [
        group
        for group in groups
        if wanted and all(same_value(value, told(group).get(key)) for key, value in wanted.items())
    ]


def same_value(asked: str, value: str | None) -> bool:
    """Return whether two settings have the same value, as 0 and 0.0 do."""
    try:
        return asked == value or float(asked) == float(value or "")
    except ValueError:
        return False


def told(group: SeedGroup) -> dict[str, str]:
    """Return a point's settings by name, together with what was typed, such as ``decode=verified_tree``."""
    typed = typed_settings(group.folders[0])
    return in_words(group.report) | {key.removeprefix("decode."): value for key, value in typed.items()}


def in_words(report: dict[str, Any]) -> dict[str, str]:
    """Return a report's settings by name, as they are written on the command line."""
    return {key: shown(value) for key, value in settings_by_name(report).items()}


def differences(groups: Sequence[SeedGroup], baseline: SeedGroup) -> list[Paired | None]:
    """Return each point's comparison with the baseline on the same problems.

    None for the baseline itself, where no common problem was judged, and where the inputs differ.
    """
    of: Verdicts = verdicts_of(baseline)

    def difference(group: SeedGroup) -> Paired | None:
        if not of_one_input(group, baseline):
            log.warning(
                "%s is not compared with %s problem by problem: its input is another", group.name, baseline.name
            )
            return None
        return compared(verdicts_of(group), of)

    return [None if group is baseline else difference(group) for group in groups]


def same_texts(groups: Sequence[SeedGroup], baseline: SeedGroup) -> list[EqualTexts | None]:
    """Return how many texts of each point equal the baseline's.

    None for the baseline itself, where the inputs differ or have no request in common, and where texts were scored.
    A warning names points whose texts are not compared only because they have no seed in common.
    """

    def equal(group: SeedGroup) -> EqualTexts | None:
        if group is baseline or not of_one_input(group, baseline) or "masks" in group.report:
            return None
        if not any(counterparts(folder, baseline.folders) for folder in group.folders):
            log.warning("texts of %s and %s are not compared: they have no seed in common", group.name, baseline.name)
        return equal_texts(group.folders, baseline.folders)

    return [equal(group) for group in groups]


def of_one_input(group: SeedGroup, other: SeedGroup) -> bool:
    """Return whether two points have streams of problems in common, with the same prompts in each of these.

    The problems' names do not tell: often they are just numbers.
    """
    key = "whole_prompts" if all("whole_prompts" in point.report for point in (group, other)) else "whole_input"
    first, second = (inputs_of(point.report, key) for point in (group, other))
    common = first.keys() & second.keys()
    return bool(common) and all(first[stream] == second[stream] for stream in common)


def inputs_of(report: dict[str, Any], key: str) -> dict[str, str | None]:
    """Return the hash that a point's report has under `key`, for each of its streams of problems."""
    given = report.get(key)
    return given if isinstance(given, dict) else {stream_of(report): given}


def stream_of(report: dict[str, Any]) -> str:
    """Return the name of a run's stream of problems."""
    return str(report["task"].get("problem_seed"))


def streams_of(group: SeedGroup) -> dict[str, list[Path]]:
    """Return the folders of a point's runs, by their stream of problems."""
    if group.report.get("streams", 1) == 1:
        return {stream_of(group.report): group.folders}
    streams: dict[str, list[Path]] = {}
    for folder in group.folders:
        streams.setdefault(stream_of(read_report(folder / "report.json")), []).append(folder)
    return streams


def verdicts_of(group: SeedGroup) -> Verdicts:
    """Return a point's verdicts by stream and problem, since problems of different streams have the same names."""
    return {
        f"{stream}/{name}": right
        for stream, runs in streams_of(group).items()
        for name, right in verdicts(runs).items()
    }
