"""A point's row in a table of runs: each figure as text, and as a bare number for `comparison.csv`."""

from __future__ import annotations

from typing import Any

from lopa_dist.jobs.show.equal_texts import EqualTexts
from lopa_dist.jobs.show.paired import Paired
from lopa_dist.jobs.show.report import accuracy_interval, draws, has_samples, judged, prompts
from lopa_dist.jobs.show.seed_groups import SeedGroup

Cells = dict[str, tuple[str, dict[str, Any]]]
"""A run's row. By column of the table: the text of its cell, and the same figures by column of `comparison.csv`."""


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
