"""HTML pages and their charts. Each page is one file that needs nothing but a browser, so people can pass it on.

`pages/parts.html` draws the charts as SVG, in the colours of the page, light or dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from numpy.typing import ArrayLike, NDArray

from lopa_dist.atomic import naming
from lopa_dist.encodable import encodable

TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("pages")),
    autoescape=True,  # for texts that models and users wrote
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


PICTURES = {127: 0x2421} | {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n\r"}
"""Control characters, which HTML must not have, and the characters that show them."""


def write_page(file: Path, template: str, **data: Any) -> Path:
    """Fill in a template of the folder `pages` with `data`, write it to `file`, and return that."""
    text = TEMPLATES.get_template(template).render(data)
    with naming(file):
        file.write_text(encodable(text).translate(PICTURES), encoding="utf-8")
    return file


@dataclass(frozen=True)
class Bar:
    """A bar with its name below it and its value above it."""

    name: str
    value: str
    height: float  # as a share of the highest bar's


@dataclass(frozen=True)
class Bars:
    """A bar chart; its `width` is shared out among the bars."""

    title: str
    axis: str  # what the bars' names stand for
    bars: list[Bar]
    width = 360
    of_letter = 6.2  # the width of a digit

    @property
    def step(self) -> float:
        """Return the width of a bar with the space around it."""
        return self.width / len(self.bars)

    @property
    def of_text(self) -> float:
        """Return the width of the longest text at a bar."""
        return self.of_letter * max(len(text) for bar in self.bars for text in (bar.name, bar.value))

    @property
    def every(self) -> int:
        """Return how many bars share a text, so that texts do not run into one another."""
        return max(1, math.ceil((self.of_text + self.of_letter) / self.step))

    @property
    def margin(self) -> float:
        """Return the width on either side for what the first and the last text need beyond their bars."""
        return round(max(0.0, (self.of_text - self.step) / 2), 1)


def bars(title: str, axis: str, names: Sequence[str], values: Sequence[float], form: str) -> Bars:
    """Return a bar for each of `values`, which are shown in the format `form`."""
    highest = max(values) or 1.0
    return Bars(title, axis, [Bar(name, format(v, form), v / highest) for name, v in zip(names, values, strict=True)])


def histogram(title: str, axis: str, values: ArrayLike) -> Bars:
    """Return bars with the share of `values` in each of several equal ranges; a range's name is where it begins."""
    from matplotlib.ticker import MaxNLocator  # it takes a second to import, and few pages need it

    values = np.asarray(values, np.float64)
    low, high = float(values.min()), float(values.max())
    edges = MaxNLocator(10).tick_values(low, high) if high > low else np.array([low, low])
    counts, edges = np.histogram(values, edges)
    names = [f"{edge:g}" for edge in edges[:-1]]
    return bars(title, axis, names, (counts / counts.sum()).tolist(), ".0%")


@dataclass(frozen=True)
class Point:
    """A run in a scatter chart."""

    name: str  # shown beside the point on a page, so it is short
    tooltip: str
    speed: float
    accuracy: float  # in percent, as is its confidence interval
    low: float
    high: float
    label: str = ""  # shown beside the point in a figure for a paper
    curve: int = 0  # points of one curve have one colour


class Scatter:
    """A chart of accuracy against a speed, with the front of the points that no other beats in both.

    `sign` is -1 where less is faster.
    """

    width, height = 436, 300  # right of `right` is room for half of the last tick's number
    left, right, top, bottom = 44, 408, 20, 262
    colors = 6  # of curves, in the style sheet

    def __init__(self, title: str, points: Sequence[Point], sign: int = 1) -> None:
        self.title, self.axis, self.points = title, "more is faster" if sign > 0 else "fewer is faster", points
        self.sign = sign
        self.x_ticks = ticks([p.speed for p in points])
        self.y_ticks = ticks([end for p in points for end in (p.low, p.high)], 100)
        self.front = [
            (sign * speed, accuracy) for speed, accuracy in front([(sign * p.speed, p.accuracy) for p in points])
        ]
        self.best = [(p.speed, p.accuracy) in self.front for p in points]
        # the front is drawn as stairs that go down to the fastest point
        steps = [corner for slow, fast in pairwise(self.front) for corner in ((slow[0], fast[1]), fast)]
        self.line = [(self.x(speed), self.y(accuracy)) for speed, accuracy in (self.front[0], *steps)]
        dots = [(self.x(p.speed), self.y(p.accuracy)) for p in points]
        places = place_labels(dots, [7.0 * len(p.name) for p in points], self.left, self.width, 11.0)
        self.labels = [(round(x, 1), round(y + 4, 1)) for x, y in places]  # middles of the base lines
        # each curve's number, and the places of its points
        self.curves = [
            (number, [(self.x(p.speed), self.y(p.accuracy)) for p in self.along(number)])
            for number in sorted({p.curve for p in points})
        ]

    def along(self, curve: int) -> list[Point]:
        """Return a curve's points, sorted by speed."""
        return sorted((p for p in self.points if p.curve == curve), key=lambda p: (p.speed, p.accuracy))

    def x(self, speed: float) -> float:
        """Return the x coordinate of a speed."""
        low, high = self.x_ticks[0], self.x_ticks[-1]
        return round(self.left + (self.right - self.left) * (speed - low) / (high - low), 1)

    def y(self, accuracy: float) -> float:
        """Return the y coordinate of an accuracy."""
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return round(self.bottom - (self.bottom - self.top) * (accuracy - low) / (high - low), 1)


Floats = NDArray[np.float64]


def place_labels(
    dots: Sequence[tuple[float, float]], widths: Sequence[float], left: float, right: float, height: float
) -> list[tuple[float, float]]:
    """Return the middle of each point's name: near the point, where the name overlaps dots and other names least.

    Args:
        dots: the points' places.
        widths: of the names.
        left, right: the limits between which names should be.
        height: of the names.
    """
    taken = np.zeros((2 * len(dots), 4))  # middle, width and height of each box: all dots, then the names so far
    taken[: len(dots)] = np.reshape([(x, y, 9.0, 9.0) for x, y in dots], (-1, 4))
    labels = []
    for number, ((x, y), width) in enumerate(zip(dots, widths, strict=True), len(dots)):
        side = 6 + width / 2
        boxes = [(x + a, y + b, width, height) for b in (-9, 10, 0, -19, 20, -29, 30) for a in (side, -side, 0)]
        inside = [p for p in boxes if left < p[0] - width / 2 and p[0] + width / 2 <= right] or boxes
        chosen = inside[int(overlaps(np.array(inside), taken[:number]).sum(1).argmin())]
        taken[number] = chosen
        labels.append(chosen[:2])
    return labels


def overlaps(a: Floats, b: Floats) -> Floats:
    """Return the areas ``[A, B]`` that boxes a ``[A, 4]`` and b ``[B, 4]`` have in common."""
    a, b = a[:, None], b[None]
    sides = (a[..., 2:] + b[..., 2:]) / 2 - abs(a[..., :2] - b[..., :2])
    areas: Floats = np.maximum(sides, 0.0).prod(-1)
    return areas


def ticks(values: Sequence[float], most: float = math.inf) -> list[float]:
    """Return evenly spaced round numbers from below the lowest value to above the highest, but within 0 and `most`."""
    from matplotlib.ticker import MaxNLocator  # it takes a second to import, and few pages need it

    low, high = min(values), max(values)
    room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    low, high = max(low - room, 0.0), min(high + room, most)
    return list(MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(low, high))


def front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points (speed, accuracy) to which no different one is equal or better in both; the slowest first."""
    return sorted({p for p in points if not any(q[0] >= p[0] and q[1] >= p[1] and q != p for q in points)})
