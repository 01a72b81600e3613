"""How many texts of two ways of decoding are the same, request by request: of lossless ones, all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from lopa_dist.jobs.folder.results import results
from lopa_dist.jobs.show.report import read_report


class EqualTexts(NamedTuple):
    """How many of the requests that two points have in common have equal texts."""

    equal: int
    requests: int


def equal_texts(runs: Sequence[Path], baseline: Sequence[Path]) -> EqualTexts | None:
    """Compare runs with those of a baseline, each with its `counterpart`; None where no request is in both.

    Requests that ended with an error in both have no texts to compare.
    """
    counterparts = {seeds_of(folder): folder for folder in baseline}
    equal = requests = 0
    for folder in runs:
        if other := counterpart(folder, counterparts):
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


def counterpart(folder: Path, others: Mapping[tuple[int, int], Path]) -> Path | None:
    """Return the run that a run is compared with, of `others` by their seeds; None if there is none.

    At temperature 0 any run of the same problems will do, for nothing is drawn by the seed: unless prompts are the
    user's own, of which each may have another temperature.
    """
    seed, problems = seeds_of(folder)
    report = read_report(folder / "report.json")
    if (seed, problems) in others or report["decode"]["temperature"] > 0 or report["task"]["name"] == "batch":
        return others.get((seed, problems))
    return next((other for (_, its), other in others.items() if its == problems), None)
