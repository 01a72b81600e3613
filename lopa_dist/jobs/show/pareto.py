"""The figure of a comparison for a paper: accuracy against each speed. It is drawn without a display."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import matplotlib

from lopa_dist.encodable import encodable
from lopa_dist.jobs.show.page import Point, Scatter, place_labels

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FRONT = "front: no run beats these in both"
COLORS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
)  # Okabe and Ito's, without yellow
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h")  # 7 colours and 8 markers have no common factor, so 56 pairs differ
LONGEST = 60  # the most characters of a name in the legend
MOST_LABELS = 24  # the most points of a chart in which points have labels
MOST_CURVES = 24  # of more, the legend names only those that reach the front
OTHERS = "#b6c1cd"  # the colour of the others
STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#1f2933",
    "axes.titleweight": "bold",
    "axes.titlesize": 11,
    "figure.dpi": 130,
    "text.parse_math": False,  # names may have dollar signs
}

PRINTED = {
    "font.size": 7,
    "axes.titlesize": 8,
    "legend.fontsize": 6.5,
    "legend.title_fontsize": 6.5,
    "legend.columnspacing": 1.2,
    "legend.handletextpad": 0.4,
    "lines.markeredgewidth": 0.0,
    "axes.linewidth": 0.6,
    "pdf.fonttype": 42,  # many venues refuse Type 3
    "ps.fonttype": 42,
}


def draw_pareto(file: Path, charts: Sequence[Scatter], curves: Sequence[str], width: float) -> None:
    """Draw charts side by side, with a legend below them in as many columns as fit.

    Of more than `MOST_CURVES` curves, only those that reach a chart's front have a colour and a name.

    Args:
        file: to be written; its suffix names the format.
        charts: all with the same points.
        curves: the name of each curve in the legend.
        width: of the printed figure, in inches.
    """
    with plt.rc_context(STYLE | PRINTED):
        shown = range(len(curves)) if len(curves) <= MOST_CURVES else reaching_the_front(charts)
        entries = {str(number): curves[number] for number in shown} | {"front": FRONT}
        if others := len(curves) - len(shown):
            entries["others"] = f"{others} others"
        longest = max(min(len(name), LONGEST) for name in entries.values())
        columns = max(1, min(len(entries), int(width / (0.058 * longest + 0.42))))
        below = 0.155 * -(-len(entries) // columns) + 0.15
        figure, panels = plt.subplots(
            1, len(charts), figsize=(width, 2.3 + below), layout="constrained", squeeze=False, sharey=True
        )
        for axes, chart in zip(panels[0], charts, strict=True):
            pareto(axes, chart, shown)
        panels[0][0].set_ylabel("accuracy, %")
        handles = dict(zip(*reversed(panels[0][0].get_legend_handles_labels()), strict=True))
        labelled = [p.label for p in charts[0].points if p.label and len(charts[0].along(p.curve)) > 1]
        title = None
        if labelled:
            name, _, first = labelled[0].partition("=")
            last = max(labelled, key=lambda label: [len(label), label]).partition("=")[2]
            few = len(charts[0].points) <= MOST_LABELS
            title = f"beside a point: {name}" if few else f"along a line: {name} from {first} to {last}"
        legend = figure.legend(
            [handles[key] for key in entries],
            list(entries),
            loc="outside lower center",
            frameon=False,
            ncols=columns,
            title=title and plain(title),
        )
        for text, name in zip(legend.get_texts(), entries.values(), strict=True):
            text.set_text(plain(name))  # as a label, one that begins with _ would be left out
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing")  # letters that matplotlib's font does not have
            figure.canvas.draw()  # which settles where points are
            for axes, chart in zip(panels[0], charts, strict=True):
                annotate(axes, [p for p in chart.points if p.label and len(chart.along(p.curve)) > 1], chart.points)
            figure.savefig(file)
        plt.close(figure)


def reaching_the_front(charts: Sequence[Scatter]) -> Sequence[int]:
    """Return the numbers of the curves with a point on some chart's front."""
    return sorted({p.curve for chart in charts for p, best in zip(chart.points, chart.best, strict=True) if best})


def plain(name: str) -> str:
    """Return a name as the figure has it: on one line, in letters that can be encoded, and not too long."""
    name = encodable(" ".join(name.split()))
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}\u2026"


def pareto(axes: Any, chart: Scatter, shown: Sequence[int]) -> None:
    """Draw accuracy against one speed: the curves `shown` with intervals, the front, and the points of all others.

    Curves are labelled by their numbers, the others by the words ``front`` and ``others``.
    """
    for place, number in enumerate(shown):
        points = chart.along(number)
        speeds, accuracies = [p.speed for p in points], [p.accuracy for p in points]
        errors = [[p.accuracy - p.low for p in points], [p.high - p.accuracy for p in points]]
        color, line = COLORS[place % len(COLORS)], "-" if len(points) > 2 else ""  # two points make no curve
        style: dict[str, Any] = {
            "color": color,
            "linestyle": line,
            "marker": MARKERS[place % len(MARKERS)],
            "label": str(number),
        }
        if place >= len(COLORS):  # a colour's second curve has open markers
            style |= {"markerfacecolor": "white", "markeredgewidth": 0.8}
        axes.errorbar(speeds, accuracies, errors, markersize=3.5, linewidth=0.8, elinewidth=0.4, **style)
    if others := [(p.speed, p.accuracy) for p in chart.points if p.curve not in shown]:
        axes.plot(*zip(*others, strict=True), "o", color=OTHERS, markersize=2, zorder=0.5, label="others")
    axes.margins(0.12)
    axes.set(xlabel=chart.title.replace("Rows of the model computed", "Rows computed"))
    axes.set(xlim=axes.get_xlim(), ylim=axes.get_ylim())
    slow, low = axes.get_xlim()[chart.sign < 0], axes.get_ylim()[0]
    stair = [(slow, chart.front[0][1]), *chart.front, (chart.front[-1][0], low)]
    style = {"color": "#cbd5e1", "linewidth": 3, "zorder": 0, "solid_joinstyle": "miter"}
    axes.step(*zip(*stair, strict=True), label="front", **style)


def in_order(dots: Sequence[tuple[float, ...]], places: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the places of labels; two on one line are exchanged if their order from left to right is not the dots'."""
    found = list(places)
    for i, j in combinations(range(len(dots)), 2):
        (x, y), (other_x, other_y) = found[i], found[j]
        if abs(y - other_y) < 1 and (dots[i][0] - dots[j][0]) * (x - other_x) < 0:
            found[i], found[j] = found[j], found[i]
    return found


def annotate(axes: Any, points: Sequence[Point], all_points: Sequence[Point]) -> None:
    """Write the labels of `points` beside them, where they overlap least; none if `all_points` are many."""
    pixel = 72 / axes.figure.dpi  # its size in typographic points
    dots = [tuple(pixel * axes.transData.transform((p.speed, p.accuracy))) for p in points]
    window = axes.get_window_extent()
    left, right = pixel * window.x0, pixel * window.x1
    if len(all_points) > MOST_LABELS:  # they would cover one another; the page has a number at each
        return
    places = place_labels(dots, [3.4 * len(p.label.partition("=")[2]) for p in points], left, right, 6.0)
    places = in_order(dots, places)
    for point, dot, place in zip(points, dots, places, strict=True):
        where, offset = (point.speed, point.accuracy), (place[0] - dot[0], place[1] - dot[1])
        color = COLORS[point.curve % len(COLORS)]
        line = {"arrowstyle": "-", "linewidth": 0.3, "color": color, "shrinkA": 0, "shrinkB": 1}
        style = {"fontsize": 6, "ha": "center", "va": "center", "color": color, "arrowprops": line}
        axes.annotate(plain(point.label.partition("=")[2]), where, offset, textcoords="offset points", **style)
