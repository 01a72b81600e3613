"""Where things stand in charts, and what pages show of texts."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import DictLoader, Environment

from lopa_dist.jobs.show import page
from lopa_dist.jobs.show.page import Point, Scatter, bars, front, histogram, overlaps, place_labels


def test_bars_are_as_high_as_their_share_of_the_highest() -> None:
    chart = bars("title", "axis", ["a", "b"], [0.5, 0.25], ".0%")
    assert [(bar.name, bar.value, bar.height) for bar in chart.bars] == [("a", "50%", 1.0), ("b", "25%", 0.5)]
    assert [bar.height for bar in bars("title", "axis", ["a"], [0.0], ".1f").bars] == [0.0]


@given(
    names=st.lists(st.text("0123456789.", min_size=1, max_size=9), min_size=1, max_size=32),
    percent=st.integers(0, 100),
)
def test_texts_at_bars_are_inside_the_chart_and_do_not_touch(names: list[str], percent: int) -> None:
    chart = bars("title", "axis", names, [percent / 100] * len(names), ".0%")
    shown = [(chart.step * (number + 0.5), bar) for number, bar in enumerate(chart.bars) if not number % chart.every]
    for texts in ([(x, bar.name) for x, bar in shown], [(x, bar.value) for x, bar in shown]):
        ends = [(x - 3 * len(text), x + 3 * len(text)) for x, text in texts]
        assert -chart.margin <= ends[0][0]
        assert ends[-1][1] <= chart.width + chart.margin
        assert all(right < left for (_, right), (left, _) in pairwise(ends))


def test_a_histogram_counts_every_value() -> None:
    chart = histogram("title", "axis", [1.0, 1.0, 2.0, 11.0])
    assert [bar.value for bar in chart.bars] == ["50%", "25%", *["0%"] * 7, "25%"]
    assert [(bar.name, bar.value) for bar in histogram("title", "axis", [3.0, 3.0]).bars] == [("3", "100%")]


def test_the_front_is_what_nothing_beats_in_both() -> None:
    assert front([(1, 9), (2, 8), (2, 7), (3, 8), (4, 1), (1, 9)]) == [(1, 9), (3, 8), (4, 1)]


speeds = st.floats(0.1, 100).map(lambda value: round(value, 2))


runs_of_a_sweep = st.lists(
    st.tuples(speeds, st.lists(st.floats(0, 100), min_size=3, max_size=3).map(sorted)), min_size=1, max_size=20
)


@settings(deadline=None)
@given(runs_of_a_sweep, st.sampled_from((1, -1)))
def test_all_points_and_names_are_inside(runs: list[tuple[float, list[float]]], sign: int) -> None:
    points = [Point(str(i), "", speed, middle, low, high) for i, (speed, (low, middle, high)) in enumerate(runs, 1)]
    chart = Scatter("title", points, sign)
    assert chart.y_ticks[0] >= 0
    assert chart.y_ticks[-1] <= 100
    for point, (x, y) in zip(points, chart.labels, strict=True):
        assert chart.left <= chart.x(point.speed) <= chart.right
        assert chart.top <= chart.y(point.high) <= chart.y(point.accuracy) <= chart.y(point.low) <= chart.bottom
        assert chart.left <= x <= chart.width
        assert 0 <= y <= chart.height
    assert any(chart.best)


def test_names_keep_clear_of_points_where_there_is_room() -> None:
    points = [Point(str(i), "", 1 + i, 90 - i, 89 - i, 91 - i) for i in range(6)]
    chart = Scatter("axis", points)
    names = [(x, y - 4, 7.0, 11.0) for x, y in chart.labels]
    dots = [(chart.x(p.speed), chart.y(p.accuracy), 9.0, 9.0) for p in points]
    boxes = [*names, *dots]
    assert not np.triu(overlaps(np.array(boxes), np.array(boxes)), 1).any()
    assert chart.line[0] == pytest.approx(dots[0][:2])
    assert chart.line[-1] == pytest.approx(dots[-1][:2])


def test_labels_of_a_crowded_sweep_do_not_cover_each_other() -> None:
    """Twelve runs close together, as in a figure of a paper."""
    dots = [(100 + 14 * (i % 4), 100 + 9 * (i // 4)) for i in range(12)]
    places = place_labels(dots, [15.0] * len(dots), 0, 400, 8)
    boxes = [(x, y, 15.0, 8.0) for x, y in places]
    covered = np.triu(overlaps(np.array(boxes), np.array(boxes)), 1).sum()
    assert covered < 0.1 * sum(width * height for _, _, width, height in boxes)


def test_control_characters_of_texts_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "TEMPLATES", Environment(loader=DictLoader({"x": "{{ text }}"}), autoescape=True))
    page.write_page(tmp_path / "x.html", "x", text="a\x00b\x1b[1m\x7f\t<\n")
    assert (tmp_path / "x.html").read_text() == "a\u2400b\u241b[1m\u2421\t&lt;\n"
