"""Pictures of one run. Drawn without a display."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from numpy.typing import NDArray

from lopa_dist.engine.statistics import PHASES, Statistics
from lopa_dist.engine.work import Work

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator

INK, ACCENT, PALE = "#1f2933", "#2563eb", "#cbd5e1"
STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.titleweight": "bold",
    "axes.titlesize": 11,
    "figure.dpi": 130,
}


def draw(path: Path, paint: Callable[[Any], None], size: tuple[float, float] = (6.4, 3.4), panels: int = 1) -> str:
    """Paint one set of axes (or a row of them, side by side) into a PNG; returns its name."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, panels, figsize=size, layout="constrained")
        paint(axes)
        figure.savefig(path)
        plt.close(figure)
    return path.name


def run_plots(folder: Path, seconds: NDArray[np.float64], work: Work, statistics: Statistics, k: int) -> list[str]:
    """The run's plots; names of the files, fewer where there is nothing to show.

    Args:
        folder: where they go.
        seconds: of all requests.
        work: of all requests.
        statistics: of the last attempt.
        k: lookahead branches.
    """
    names = []
    if statistics.filled:
        names.append(draw(folder / "tokens_per_forward.png", lambda a: tokens_per_forward(a, statistics)))
    if work.proposed:
        names.append(draw(folder / "acceptance.png", lambda a: acceptance(a, work)))
    if work.wins:
        names.append(draw(folder / "branch_wins.png", lambda a: branch_wins(a, work, k)))
    if len(seconds):
        names.append(draw(folder / "latency.png", lambda a: latency(a, seconds)))
        names.append(draw(folder / "step_time.png", lambda a: step_time(a, statistics)))
    return names


def tokens_per_forward(axes: Any, statistics: Statistics) -> None:
    """How many tokens a forward of a sequence fills, along the run."""
    steps, forwards, tokens = (np.array(column, float) for column in zip(*statistics.filled, strict=True))
    bins = np.array_split(np.arange(len(steps)), min(60, len(steps)))
    x = [steps[: b[-1] + 1].sum() for b in bins]
    y = [tokens[b].sum() / max(1.0, forwards[b].sum()) for b in bins]
    axes.plot(x, y, color=ACCENT)
    axes.axhline(tokens.sum() / forwards.sum(), color=INK, linewidth=0.8, linestyle="--", label="mean")
    axes.set(title="Tokens filled per forward (filler included)", xlabel="step", ylabel="tokens", ylim=(0, None))
    axes.legend(frameon=False)


def acceptance(axes: Any, work: Work) -> None:
    """How many of the drafts were accepted, by their depth in the chain."""
    shares = work.acceptance()
    axes.bar(range(1, len(shares) + 1), [100 * share for share in shares], color=ACCENT)
    title = f"Accepted drafts: {work.accepted_per_forward():.2f} a forward"
    axes.set(title=title, xlabel="depth in the chain of drafts", ylabel="% accepted with all before", ylim=(0, 100))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def branch_wins(axes: Any, work: Work, k: int) -> None:
    """How often each branch was chosen."""
    counts = np.array([work.wins.get(j, 0) for j in range(k + 1)], float)
    names = ["anchor", *(str(j) for j in range(1, k + 1))]
    axes.bar(names, 100 * counts / max(1.0, counts.sum()), color=[PALE, *[ACCENT] * k])
    axes.set(title="Which branch won", xlabel="branch", ylabel="% of forwards with a choice")


def latency(axes: Any, seconds: NDArray[np.float64]) -> None:
    """From admission to finish."""
    axes.hist(seconds, bins=30, color=ACCENT)
    axes.set(title="Latency of a request", xlabel="seconds", ylabel="requests")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def step_time(axes: Any, statistics: Statistics) -> None:
    """Where a step's time goes."""
    parts = statistics.milliseconds()
    values = [parts[p] for p in PHASES]
    bars = axes.barh(PHASES, values, color=ACCENT)
    axes.bar_label(bars, [f"{v:.2f} ms" for v in values], padding=4)
    axes.invert_yaxis()
    axes.set(title=f"Mean step: {parts['total']:.1f} ms", xlabel="milliseconds", xlim=(0, max(values) * 1.2))
