"""The live line keeps its count and the time left, however narrow the terminal is."""

from __future__ import annotations

import io
import logging
import re

import pytest
from rich.console import Console
from rich.live import Live

from lopa_dist.engine.statistics import Statistics
from lopa_dist.jobs.show import progress
from lopa_dist.jobs.show.progress import ProgressDisplay
from lopa_dist.parallel.stop import Stop


class Closed(io.StringIO):
    """A stream whose reader has left."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_closed_terminal_ends_no_job(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """rich would leave the program at a broken pipe."""
    with monkeypatch.context() as patch:
        patch.setattr("sys.stderr", Closed())
        with ProgressDisplay("always", 9, Statistics(), 5.0) as display:
            for done in range(3):
                display.update(
                    {"done": done, "tokens": 1, "forwards": 1, "judged": 0, "right": 0, "failed": 0, "invalid": 0}
                )
    assert [record.message.split(" (")[0] for record in caplog.records] == ["WARNING: progress can no longer be shown"]


@pytest.mark.parametrize("total", [200, 1_319, 1_000_000])
@pytest.mark.parametrize("width", [40, 80, 200])
def test_count_and_time_stay_whole(total: int, width: int) -> None:
    statistics = Statistics()
    statistics.wins.update({0: 5, 1: 6})
    display = ProgressDisplay("always", total, statistics, 5.0)
    for done in (total // 4, total // 2):  # two, for the time left
        display.update(
            {"done": done, "tokens": 12_345, "forwards": 3_210, "judged": 100, "right": 97, "failed": 0, "invalid": 0}
        )
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(display.progress.get_renderable())
    (line,) = console.export_text().splitlines()
    assert re.search(rf" {total // 2}/{total} \d+:\d\d:\d\d ", line), line
    if width == 80:
        assert re.search(r"\d tokens/s, TPF 3\.85", line)
    if width == 200:
        assert re.search("97.0%( of 100)? right, lookahead won 55%", line)
    assert ("\u2026" in line) == (width < 200)


@pytest.mark.parametrize("found", [None, "ipywidgets"])
def test_a_notebook_shows_no_bar_of_short_calls_and_none_without_ipywidgets(
    monkeypatch: pytest.MonkeyPatch, found: str | None
) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr(progress, "find_spec", lambda name: found)
    started: list[None] = []
    monkeypatch.setattr(Live, "start", lambda *_, **__: started.append(None))
    for seconds in (3600.0, 0.0):
        monkeypatch.setattr(progress, "SHORT_S", seconds)
        display = ProgressDisplay("auto", 9, Statistics(), 5.0)
        with display:
            if seconds == 0.0 and display.later:
                display.later.join()
        assert len(started) == (seconds == 0.0 and found is not None)


def test_failures_elapsed_time_and_a_stop_are_said(caplog: pytest.LogCaptureFixture) -> None:
    display, stop = ProgressDisplay("auto", 9, Statistics(), 5.0), Stop(20.0)
    now = {"done": 3, "tokens": 10, "forwards": 5, "judged": 0, "right": 0, "invalid": 0}
    display.began -= 333
    display.update(now | {"failed": 2})
    assert display.status().startswith("2 failed, 0:05:33 so far, 0 tokens/s")
    display.update(now | {"failed": 0, "invalid": 0})
    assert display.status().startswith("0:05:33 so far")
    display.update(now | {"failed": 1, "judged": 2, "right": 1})
    assert "50.0% right" in display.status()
    display.update(now | {"failed": 0, "judged": 2, "right": 1})
    assert "50.0% of 2 right" in display.status(), "an earlier attempt has judged the other"
    display.learning(0.34, 1.234)
    assert display.status().startswith("learning 34%, loss 1.23, 0:05:33 so far")
    display.learned()
    assert display.status().startswith("0:05:33 so far")
    with caplog.at_level(logging.INFO, "lopa_dist"):
        display.stopping(stop, 16)
        assert not caplog.messages
        stop.ask("SIGTERM")
        display.stopping(stop, 16)
        display.stopping(stop, 15)
    assert caplog.messages == ["stopping: 16 in flight, at most 20 s (job.grace_s)"]
    assert display.status().startswith("stopping, 0:05:33 so far")


def test_answers_that_are_not_of_their_format_are_counted_apart(caplog: pytest.LogCaptureFixture) -> None:
    """And where none is, that is said early: hours may be lost."""
    display = ProgressDisplay("auto", 900, Statistics(), 5.0)
    now = {"tokens": 10, "forwards": 5, "judged": 0, "right": 0, "failed": 2}
    for done in (101, 102, 103):
        display.update(now | {"done": done, "invalid": done - 2})
    assert "2 failed, 101 in the wrong format, " in display.status()
    assert caplog.messages.count("none of the first 100 answers has the format that was asked for") == 1
    assert sum("none of the first" in message for message in caplog.messages) == 1
