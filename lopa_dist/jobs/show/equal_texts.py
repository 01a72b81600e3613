"""How many texts of two ways of decoding are the same, request by request; if decoding is lossless, all are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lopa_dist.jobs.folder.results import results
from lopa_dist.jobs.show.report import draws, read_report


class EqualTexts(NamedTuple):
    """How many of the requests that two points have in common have equal texts, and how many there are."""

    equal: int
    requests: int


def equal_texts(runs: Sequence[Path], baseline: Sequence[Path]) -> EqualTexts | None:
    """Return how many texts of runs equal those of their `counterparts` in a baseline; None if no request is in both.

    Requests that ended with an error in both are left out, as they have no texts to compare.
    """
    equal = requests = 0
    for folder in runs:
        for other in counterparts(folder, baseline):
            texts = {line["custom_id"]: text_of(line) for line in results(other)}
            for line in results(folder):
                name, text = line["custom_id"], text_of(line)
                if name in texts and (text, texts[name]) != (None, None):
                    requests += 1
                    equal += text == texts[name]
    return EqualTexts(equal, requests) if requests else None


def text_of(line: Mapping[str, Any]) -> str | None:
    """Return the text of a result line; None if its request ended with an error, or was scored."""
    return None if line["finish_reason"] == "error" else line.get("text")


def seeds_of(folder: Path) -> tuple[int, int]:
    """Return the seeds of a run's random numbers and of its problems."""
    report = read_report(folder / "report.json")
    return report["seed"], report["task"].get("problem_seed", 0)


def counterparts(folder: Path, baseline: Sequence[Path]) -> list[Path]:
    """Return the runs of a baseline that a run is compared with: those on the same problems, with the same seed.

    At temperature 0 nothing is drawn. If neither the run nor the baseline draws, one run with another seed will do. If
    only one of the two draws, all of the baseline's runs on these problems count.
    """
    seed, problems = seeds_of(folder)
    others = [other for other in baseline if seeds_of(other)[1] == problems]
    same = [other for other in others if seeds_of(other)[0] == seed]
    drawn, *of_others = (draws(read_report(run / "report.json")) for run in (folder, *others))
    if any(one != drawn for one in of_others):
        return others
    return same if same or drawn else others[:1]
