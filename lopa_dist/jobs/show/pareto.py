"""The figure of a comparison for a paper: accuracy against each speed. Drawn without a display."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from lopa_dist.jobs.show.page import Point, Scatter, place_labels

matplotlib.use("Agg")
import matplotlib.pyplot as plt

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


def draw_pareto(file: Path, charts: Sequence[Scatter], curves: Sequence[str], named_points: bool) -> None:
    """Draw charts side by side.

    Args:
        file: whose suffix names the format.
        charts: with the same points.
        curves: the settings of each curve, for the legend.
        named_points: the labels beside the points say what they are, and the legend leaves the settings out.
    """

    def paint(drawn: Any) -> None:
        panels = np.atleast_1d(drawn)
        figure = panels[0].figure
        for axes, chart in zip(panels, charts, strict=True):
            pareto(axes, chart, ["_"] * len(curves) if named_points else curves)
        panels[0].set_ylabel("accuracy, %")
        legend = panels[0].get_legend_handles_labels()
        figure.legend(*legend, loc="outside lower center", frameon=False, ncols=min(4, len(legend[1])))
        figure.canvas.draw()  # so that it is known where points are
        for axes, chart in zip(panels, charts, strict=True):
            annotate(axes, chart.points, named_points)

    draw(file, paint, (3.6 * len(charts), 3.4), panels=len(charts))


def pareto(axes: Any, chart: Scatter, curves: Sequence[str]) -> None:
    """Draw accuracy with its intervals against one speed: a curve for each setting, and the front."""
    for number, name in enumerate(curves):
        points = chart.along(number)
        speeds, accuracies = [p.speed for p in points], [p.accuracy for p in points]
        errors = [[p.accuracy - p.low for p in points], [p.high - p.accuracy for p in points]]
        line = "-" if len(points) > 2 else ""  # two points make no curve
        style = {"color": DARK if name == "_" else None, "label": name or "_", "linestyle": line}
        axes.errorbar(speeds, accuracies, errors, marker="o", markersize=4, linewidth=1, elinewidth=0.6, **style)
    axes.margins(0.12)
    axes.set(xlabel=chart.title, xlim=axes.get_xlim(), ylim=axes.get_ylim())
    slow, low = axes.get_xlim()[chart.sign < 0], axes.get_ylim()[0]
    stair = [(slow, chart.front[0][1]), *chart.front, (chart.front[-1][0], low)]
    axes.step(*zip(*stair, strict=True), color="#cbd5e1", linewidth=4, zorder=0, label=FRONT, solid_joinstyle="miter")


def annotate(axes: Any, points: Sequence[Point], colored: bool) -> None:
    """Write labels beside points, where they cover the least of what is there.

    With `colored`, each has its point's colour: labels of neighbours stand close together.
    """
    pixel = 72 / axes.figure.dpi  # in points
    dots = [tuple(pixel * axes.transData.transform((p.speed, p.accuracy))) for p in points]
    window = axes.get_window_extent()
    widths = [4.5 * len(p.label) for p in points]
    places = place_labels(dots, widths, pixel * window.x0, pixel * window.x1 + 16, 8.0)
    for number, (point, dot, place) in enumerate(zip(points, dots, places, strict=True)):
        color = f"C{number % 10}" if colored else DARK
        where, offset = (point.speed, point.accuracy), (place[0] - dot[0], place[1] - dot[1])
        style = {"fontsize": 7, "ha": "center", "va": "center", "color": color}
        axes.annotate(point.label, where, offset, textcoords="offset points", **style)
        if colored:
            axes.plot(*where, "o", markersize=5, color=color, label="_", zorder=4)
