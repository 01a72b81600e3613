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
    """Compare runs with those of a baseline, seed by seed; None where they have no seed or no request in common."""
    theirs = {seeds_of(folder): folder for folder in baseline}
    equal = requests = 0
    for folder in runs:
        if other := theirs.get(seeds_of(folder)):
            texts = {line["custom_id"]: hash(line.get("text")) for line in results(other)}
            own = [line for line in results(folder) if line["custom_id"] in texts]
            requests += len(own)
            equal += sum(hash(line.get("text")) == texts[line["custom_id"]] for line in own)
    return EqualTexts(equal, requests) if requests else None


def seeds_of(folder: Path) -> tuple[int, int]:
    """Return what a run's random numbers and its problems are drawn with."""
    report = read_report(folder / "report.json")
    return report["seed"], report["task"].get("problem_seed", 0)
