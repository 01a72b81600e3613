"""Figures for papers: names of any kind, and labels beside their points."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from lopa_dist.jobs.show.compare import compare
from lopa_dist.jobs.show.page import Point, Scatter
from lopa_dist.jobs.show.pareto import FRONT, draw_pareto, in_order
from tests.jobs.show.sweeps import make


def test_labels_side_by_side_stand_as_their_points() -> None:
    assert in_order([(1, 0), (2, 0)], [(5, 9), (3, 9)]) == [(3, 9), (5, 9)]
    assert in_order([(1, 0), (2, 0)], [(5, 9), (3, 0)]) == [(5, 9), (3, 0)]


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize("names", [("a$^$x", "b$5_^$"), ("_one", "_two"), ("caf\udce9", "\u4e00 b\tc")])
def test_figures_have_runs_of_any_name(
    tmp_path: Path, report: dict[str, Any], names: Sequence[str], recwarn: pytest.WarningsRecorder
) -> None:
    for drafts, name in enumerate(names):
        make(tmp_path, name, report, "++--", drafts=drafts)
    compare(tmp_path, Console(quiet=True))
    assert (tmp_path / "pareto.pdf").stat().st_size > 1000
    assert (tmp_path / "comparison.html").exists()
    assert not [warning for warning in recwarn if "Glyph" in str(warning.message)]


def test_a_legend_has_every_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """matplotlib leaves out labels that begin with an underscore."""
    shown = []
    legend = Figure.legend
    monkeypatch.setattr(Figure, "legend", lambda *of, **more: shown.append(legend(*of, **more)) or shown[-1])
    points = [Point(str(i), "", 1.0 + i, 50.0, 40.0, 60.0, "", i) for i in range(2)]
    draw_pareto(tmp_path / "x.pdf", [Scatter("Tokens per forward", points)], ["_one", "$\\frac"], 3.3)
    assert [text.get_text() for text in shown[0].get_texts()] == ["_one", "$\\frac", FRONT]
    many = [Point(str(i), "", 1.0 + i % 30, 90.0 - i % 30 - i // 30, 40.0, 95.0, "", i) for i in range(200)]
    names = [f"run {i}" for i in range(200)]
    draw_pareto(tmp_path / "x.pdf", [Scatter("Tokens per forward", many[:-170] + many[30:])], names, 3.3)
    assert [text.get_text() for text in shown[1].get_texts()] == [*names[:30], FRONT, "170 others"]
