"""Two ways of decoding, compared on the same problems: the difference of their accuracies, and whether it is chance."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean, pstdev

from lopa_dist.jobs.folder.results import prompt_of, results

Verdicts = Mapping[str, float]
"""By problem, 1 for a right answer and 0 for a wrong one; for several answers, the mean."""


@dataclass(frozen=True)
class Paired:
    """How a run compares with a baseline on the problems that were judged in both."""

    difference: float  # the run's accuracy less the baseline's
    low: float  # its 95 % confidence interval (Agresti and Min, Statistics in Medicine 2005)
    high: float
    better: int  # problems that the run gets right and the baseline wrong
    worse: int  # the other way round
    p: float  # of McNemar's exact test
    problems: int


def verdicts(folders: Sequence[Path]) -> Verdicts:
    """Return the verdicts of runs that differ only in their seed; each is the mean over runs and a prompt's samples."""
    judged = defaultdict(list)
    for folder in folders:
        for line in results(folder):
            if line.get("correct") is not None:
                judged[prompt_of(line)].append(float(line["correct"]))
    return {problem: fmean(values) for problem, values in judged.items()}


def least_splits(count: int, most: int) -> int:
    """Return in how many ways up to `most` of `count` problems can be chosen."""
    total, ways = 0, 1  # ways to choose `number` of them
    for number in range(most + 1):
        total, ways = total + ways, ways * (count - number) // (number + 1)
    return total


def compared(run: Verdicts, baseline: Verdicts) -> Paired | None:
    """Return how `run` compares with `baseline`; None where they have no problem in common.

    McNemar's exact test gives the probability that chance splits the problems on which the two differ at least this
    unevenly. With means over seeds or samples it is the sign test of the problems' differences.
    """
    differences = [right - baseline[problem] for problem, right in run.items() if problem in baseline]
    if not differences:
        return None
    better, worse = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    tail = least_splits(better + worse, min(better, worse)) / 2 ** (better + worse)
    count = len(differences)
    # half a problem more in each of the four cells: two problems, whose squared differences sum to 1
    added = [1 / sqrt(2), -1 / sqrt(2), *differences]
    middle, half = fmean(added), 1.96 * pstdev(added) / sqrt(count + 2)
    low, high = max(-1.0, middle - half), min(1.0, middle + half)
    return Paired(fmean(differences), low, high, better, worse, min(1.0, 2 * tail), count)
