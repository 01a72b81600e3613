"""How busy others keep the cores is what neither idled nor was computed here."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from lopa_dist.jobs.setup import other_programs


@pytest.mark.parametrize(("idle", "busy"), [((0.2, 0.2), 0), ((0.2, 0.0), 1), ((0.0, 0.0), 2), ((0.15, 0.19), 0)])
def test_busy_cores_are_those_that_hardly_idle(
    monkeypatch: pytest.MonkeyPatch, idle: tuple[float, float], busy: int
) -> None:
    clock = iter([10.0, 10.2])
    readings = iter([{0: 5.0, 1: 7.0}, {0: 5.0 + idle[0], 1: 7.0 + idle[1]}])
    monkeypatch.setattr(other_programs, "idle_seconds", lambda: next(readings))
    monkeypatch.setattr(other_programs.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(other_programs.time, "sleep", lambda _: None)
    assert other_programs.busy_now() == busy


@pytest.mark.parametrize(("looks", "least"), [((2, 1, 0), 0), ((1, 2, 1, 1, 2), 1), ((2,) * 5, 2)])
def test_cores_that_were_busy_for_a_moment_are_not_left_to_others(
    monkeypatch: pytest.MonkeyPatch, looks: tuple[int, ...], least: int
) -> None:
    left = iter(looks)
    monkeypatch.setattr(other_programs, "idle_seconds", lambda: {0: 5.0, 1: 7.0})
    monkeypatch.setattr(other_programs, "busy_now", lambda: next(left))
    assert other_programs.busy_cores.__wrapped__() == least
    assert next(left, None) is None


def test_how_busy_others_were_is_what_neither_idled_nor_was_computed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"clock": 0.0, "own": 5.0, "idle": {0: 10.0, 3: 10.0}}
    monkeypatch.setattr(other_programs.time, "perf_counter", lambda: now["clock"])
    monkeypatch.setattr(other_programs, "own_seconds", lambda: now["own"])
    monkeypatch.setattr(other_programs, "idle_seconds", lambda: now["idle"])
    others = other_programs.OtherPrograms()
    now.update(clock=0.5)
    assert others.busy() is None, "too short to say"
    now.update(clock=10.0, own=12.0, idle={0: 11.0, 3: 16.0})
    assert others.busy() == pytest.approx(0.6)  # of 20 seconds, 7 idle and 7 of this process
    now.update(idle={})
    assert others.busy() is None
    monkeypatch.setattr(other_programs, "MUCH", 0.4)
    cases = ((None, 2, 2), (0.6, 2, 2), (0.6, 1, 2), (1.5, 1, 2), (0.1, 2, 2))
    assert [other_programs.contended(*of) for of in cases] == [False, True, False, True, False]


def test_the_time_of_children_is_this_process_s(tmp_path: Path) -> None:
    tick = other_programs.os.sysconf("SC_CLK_TCK")
    for pid, parent, ticks in ((5, 1, "1 1 1 1"), (6, 5, "1 2 3 4"), (7, 6, "0 0 0 1"), (8, 2, "9 9 9 9")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a )b) S {parent} 0 0 0 0 0 0 0 0 0 {ticks} 0")
    assert sum(other_programs.of_descendants(5, tmp_path)) == pytest.approx(11 / tick)
    assert other_programs.own_seconds() > 0


def test_a_system_that_does_not_tell_has_no_busy_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert other_programs.idle_seconds(tmp_path / "stat") == {}
    monkeypatch.setattr(other_programs, "idle_seconds", partial(other_programs.idle_seconds, tmp_path / "stat"))
    assert other_programs.busy_cores.__wrapped__() == 0
    monkeypatch.undo()
    (tmp_path / "stat").write_text("cpu  9 9 9 9\ncpu0 1 2 3 400 50 0 0\ncpux\nintr 5\n")
    assert set(other_programs.idle_seconds(tmp_path / "stat")) <= {0}
