"""The figure of a comparison for a paper: accuracy against each speed. Drawn without a display."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

from lopa_dist.jobs.show.page import front, place_labels
from lopa_dist.jobs.show.report import accuracy_interval

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Curves = dict[str, list[tuple[str, dict[str, Any]]]]
"""By curve: what stands beside each run's point, and the run's report."""
Speed = tuple[str, Callable[[dict[str, Any]], float | None], int]
"""The name of an axis, how a report's speed is read, and -1 where less is faster."""
DARK = "#1f2933"
FRONT = "front: no run beats these in both"
STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#1f2933",
    "axes.titleweight": "bold",
    "axes.titlesize": 11,
    "figure.dpi": 130,
}


def draw(path: Path, paint: Callable[[Any], None], size: tuple[float, float] = (6.4, 3.4), panels: int = 1) -> str:
    """Paint one set of axes, or `panels` side by side, into a file whose suffix names the format; returns its name."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, panels, figsize=size, layout="constrained")
        paint(axes)
        figure.savefig(path)
        plt.close(figure)
    return path.name


def draw_pareto(file: Path, curves: Curves, speeds: Sequence[Speed], named_points: bool) -> None:
    """Draw accuracy against each of `speeds`, side by side.

    With `named_points` the names beside the points say what they are, and the legend leaves the settings out.
    """

    def paint(panels: Any) -> None:
        figure = panels[0].figure
        for axes, speed in zip(panels, speeds, strict=True):
            pareto(axes, curves, speed, named_points)
            axes.set_ylabel("accuracy, %" if axes is panels[0] else "")
        legend = panels[0].get_legend_handles_labels()
        figure.legend(*legend, loc="outside lower center", frameon=False, ncols=min(4, len(legend[1])))
        figure.canvas.draw()  # so that it is known where points are
        for axes, (_, speed_of, _) in zip(panels, speeds, strict=True):
            runs = [run for curve in curves.values() for run in curve]
            points = [(name, float(speed_of(r) or 0), 100 * r["accuracy"]) for name, r in runs]
            annotate(axes, points, [color_of(n) if named_points else DARK for n in range(len(runs))])

    draw(file, paint, (3.6 * len(speeds), 3.4), panels=len(speeds))


def pareto(axes: Any, curves: Curves, speed: Speed, named_points: bool) -> None:
    """Draw accuracy with its intervals against one speed: a curve for each setting, and the front."""
    axis, speed_of, sign = speed
    best = front([(sign * float(speed_of(r) or 0), 100 * r["accuracy"]) for curve in curves.values() for _, r in curve])
    for curve, found in curves.items():
        x, y = [speed_of(r) for _, r in found], [100 * r["accuracy"] for _, r in found]
        ends = [accuracy_interval(r) for _, r in found]
        errors = [[y - 100 * low for y, (low, _) in zip(y, ends, strict=True)]]
        errors += [[100 * high - y for y, (_, high) in zip(y, ends, strict=True)]]
        line = "-" if len(found) > 2 else ""  # two points make no curve
        color = DARK if named_points else None
        legend = "_" if named_points or not curve else curve
        axes.errorbar(
            x,
            y,
            errors,
            marker="o",
            markersize=4,
            linestyle=line,
            linewidth=1,
            elinewidth=0.6,
            color=color,
            label=legend,
        )
    if named_points:  # a name has its point's colour: names of neighbours stand close together
        for number, (_, r) in enumerate(run for curve in curves.values() for run in curve):
            axes.plot(speed_of(r), 100 * r["accuracy"], "o", markersize=5, color=color_of(number), label="_", zorder=4)
    axes.margins(0.12)
    axes.set(xlabel=axis, xlim=axes.get_xlim(), ylim=axes.get_ylim())
    slow, low = axes.get_xlim()[sign < 0], axes.get_ylim()[0]
    corners = [(slow, best[0][1]), *((sign * x, y) for x, y in best), (sign * best[-1][0], low)]
    stair = [(x, y, after) for (x, y), (_, after) in zip(corners, [*corners[1:], corners[-1]], strict=True)]
    path = [point for x, y, after in stair for point in ((x, y), (x, after))]
    axes.plot(*zip(*path, strict=True), color="#cbd5e1", linewidth=4, zorder=0, label=FRONT, solid_joinstyle="miter")


def color_of(number: int) -> str:
    """The colour of the run of that number; ten follow one another."""
    return f"C{number % 10}"


def annotate(axes: Any, points: Sequence[tuple[str, float, float]], colors: Sequence[str]) -> None:
    """Write names beside points, where they cover the least of what is there, each in its colour."""
    pixel = 72 / axes.figure.dpi  # in points
    dots = [tuple(pixel * axes.transData.transform((x, y))) for _, x, y in points]
    window = axes.get_window_extent()
    places = place_labels(
        dots, [4.5 * len(name) for name, _, _ in points], pixel * window.x0, pixel * window.x1 + 16, 8.0
    )
    for (name, x, y), color, dot, place in zip(points, colors, dots, places, strict=True):
        offset = (place[0] - dot[0], place[1] - dot[1])
        axes.annotate(
            name, (x, y), offset, textcoords="offset points", fontsize=7, ha="center", va="center", color=color
        )
