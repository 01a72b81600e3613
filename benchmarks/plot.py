"""A figure in the style of the project's others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from lopa_dist.jobs.show.pareto import STYLE


def draw(path: Path, paint: Callable[[Any], None], size: tuple[float, float] = (6.4, 3.4), panels: int = 1) -> str:
    """Let `paint` fill one set of axes, or `panels` side by side, save them as `path`, and return the file's name.

    The file's suffix names the format.
    """
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, panels, figsize=size, layout="constrained")
        paint(axes)
        figure.savefig(path)
        plt.close(figure)
    return path.name
