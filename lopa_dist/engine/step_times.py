"""How long steps take, by kind and rows: ``drafts=auto`` compares these times with the tokens that steps bring."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from statistics import median, median_low
from typing import NamedTuple

import numpy as np

REMEMBERED = 9  # last steps of a size class whose median time counts
SPAN = 2.0  # a kind's times serve for other sizes if its largest step had this many times the rows of its smallest


class StepKind(NamedTuple):
    """What makes a step take longer than another with as many rows."""

    adapter: bool = False  # whether there are masks that run through an adapter of their own
    text: bool = False  # whether the host drafts from text


class StepTimes:
    """How long a step takes, by its rows: medians of the last measured times, with straight lines between them.

    Of an even number of times, the lower of the two in the middle counts: disturbances only make steps longer.
    """

    def __init__(self) -> None:
        self.last: dict[int, deque[tuple[int, float]]] = {}  # by size class: rows and seconds
        self.medians: dict[int, tuple[float, float]] = {}  # of their rows and of their seconds
        self.changed: set[int] = set()  # size classes with steps measured since the last `fit`
        self.points: list[tuple[float, float]] = []  # rows and seconds of each class, the fewest rows first
        self.line = 0.0, 0.0  # seconds of a step without rows, and of a row, fitted to all points

    def measured(self, rows: int, seconds: float) -> None:
        """Add the measured time of a step."""
        size = int(4 * np.log2(max(rows, 1)))  # a class has up to a fifth more rows than the one before
        self.last.setdefault(size, deque(maxlen=REMEMBERED)).append((rows, seconds))
        self.changed.add(size)

    def fit(self) -> None:
        """Update `points` and `line` from the measured steps."""
        if not self.changed:
            return
        for size in self.changed:
            rows, seconds = zip(*self.last[size], strict=True)
            self.medians[size] = median(rows), median_low(seconds)
        self.changed.clear()
        self.points = sorted(self.medians.values())
        if len(self.points) > 1:
            x, y = np.array(self.points).T
            weight = y**-2 / (y**-2).sum()  # least squares of errors relative to the seconds
            off = x - weight @ x
            slope = max(float(weight * off @ y / (weight * off @ off)), 0.0)
            self.line = max(float((y - slope * x).mean()), 0.0), slope

    @property
    def span(self) -> float:
        """Return the rows of the largest measured steps divided by those of the smallest."""
        return self.points[-1][0] / max(self.points[0][0], 1) if self.points else 0.0

    def expected(self, rows: float) -> float:
        """Return the expected seconds of a step with `rows` rows, from the steps measured until the last `fit`.

        Outside the measured sizes it follows the line, but stays between the time of the nearest measured size and
        that time multiplied by the ratio of their rows.
        """
        if not self.points:
            return 1.0
        at = bisect_left(self.points, (rows, 0.0))
        if 0 < at < len(self.points):
            (low_rows, low), (high_rows, high) = self.points[at - 1 : at + 1]
            return low + (high - low) * (rows - low_rows) / (high_rows - low_rows)
        near_rows, near = self.points[min(at, len(self.points) - 1)]
        bounds = sorted((near, near * rows / near_rows))
        return min(max(self.line[0] + self.line[1] * rows, bounds[0]), bounds[1])


class TimesByKind:
    """How long a step takes, by its kind and its rows."""

    def __init__(self) -> None:
        self.all = StepTimes()
        self.times: dict[StepKind, StepTimes] = {}
        self.asked: dict[StepKind, StepTimes] = {}  # what `of` returned since the last `fit`

    def measured(self, rows: int, seconds: float, kind: StepKind) -> None:
        """Add the measured time of a step."""
        for times in (self.all, self.times.setdefault(kind, StepTimes())):
            times.measured(rows, seconds)

    def fit(self) -> None:
        """Take the steps measured so far into account."""
        self.asked.clear()
        for times in (self.all, *self.times.values()):
            times.fit()

    def of(self, kind: StepKind) -> StepTimes:
        """Return the times of a kind of step.

        While all of its measured steps had about as many rows, which says little about other sizes, they are those of
        the most similar kind, or of all kinds together.
        """
        if kind not in self.asked:
            self.asked[kind] = self.most_similar(kind)
        return self.asked[kind]

    def most_similar(self, kind: StepKind) -> StepTimes:
        """Return the times of the kind that is most similar to `kind`, among those whose steps had enough sizes."""
        known = [other for other, times in self.times.items() if times.span >= SPAN]
        if not known:
            return self.all
        return self.times[min(known, key=lambda other: (other.adapter != kind.adapter, other.text != kind.text))]
