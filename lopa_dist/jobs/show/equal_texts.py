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
    """Compare runs with those of a baseline, seed by seed; None where they have no seed or no request in common.

    Requests that ended with an error in both have no texts to compare.
    """
    counterparts = {seeds_of(folder): folder for folder in baseline}
    equal = requests = 0
    for folder in runs:
        if other := counterparts.get(seeds_of(folder)):
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
