"""How many texts of two ways of decoding are the same, request by request: of lossless ones, all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lopa_dist.jobs.folder.results import results
from lopa_dist.jobs.show.report import read_report


class EqualTexts(NamedTuple):
    """How many of the requests that two points have in common have equal texts."""

    equal: int
    requests: int


def equal_texts(runs: Sequence[Path], baseline: Sequence[Path]) -> EqualTexts | None:
    """Compare runs with those of a baseline, each with its `counterparts`; None where no request is in both.

    Requests that ended with an error in both have no texts to compare.
    """
    equal = requests = 0
    for folder in runs:
        for other in counterparts(folder, baseline):
            texts = {line["custom_id"]: line.get("text") for line in results(other)}
            for line in results(folder):
                name, text = line["custom_id"], line.get("text")
                if name in texts and (text, texts[name]) != (None, None):
                    requests += 1
                    equal += text == texts[name]
    return EqualTexts(equal, requests) if requests else None


def seeds_of(folder: Path) -> tuple[int, int]:
    """Return what a run's random numbers and its problems are drawn with."""
    report = read_report(folder / "report.json")
    return report["seed"], report["task"].get("problem_seed", 0)


def counterparts(folder: Path, baseline: Sequence[Path]) -> list[Path]:
    """Return the runs of a baseline that a run is compared with: of the same problems and, where it is drawn by, seed.

    At temperature 0 nothing is drawn. Then any run that draws nothing either will do, and all runs that do count. Only
    prompts of the user's own may each have another temperature.
    """
    seed, problems = seeds_of(folder)
    others = [other for other in baseline if seeds_of(other)[1] == problems]
    same = [other for other in others if seeds_of(other)[0] == seed]
    drawn = draws(folder)
    if any(draws(other) != drawn for other in others):
        return others
    return same if same or drawn else others[:1]


def draws(folder: Path) -> bool:
    """Return whether a run's tokens may be drawn by its seed."""
    report = read_report(folder / "report.json")
    return report["decode"]["temperature"] > 0 or report["task"]["name"] == "batch"
