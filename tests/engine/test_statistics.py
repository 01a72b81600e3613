"""The phases of a step, by the host's clock and by a device's."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from lopa_dist.engine.statistics import Statistics
from lopa_dist.engine.work import Work


@dataclass
class Clock:
    """Time of a host, and of a device that begins when it is told and works on after the host has gone on."""

    now: float = 0.0
    device: float = 0.0
    marks: set[int] = field(default_factory=set)
    kept: list[Moment] = field(default_factory=list)  # so that no mark has the number of an earlier one

    def work(self, launching: float, seconds: float) -> None:
        """The host launches work of some seconds."""
        began = max(self.now, self.device)
        self.now += launching
        self.device = max(began + seconds, self.now)

    def wait(self) -> None:
        self.now = self.device = max(self.now, self.device)

    def mark(self, again: Moment | None = None) -> Moment:
        moment = again or Moment()
        moment.at = max(self.now, self.device)
        self.marks.add(id(moment))
        self.kept.append(moment)
        return moment


@dataclass
class Moment:
    at: float = 0.0

    def elapsed_time(self, end_event: Moment) -> float:
        return 1000 * (end_event.at - self.at)


@pytest.mark.parametrize("on_device", [False, True])
def test_phases_get_the_time_of_the_device(monkeypatch: pytest.MonkeyPatch, on_device: bool) -> None:
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", lambda: clock.now)
    statistics = Statistics(clock.mark if on_device else None)
    clock.now = clock.device = 5.0
    statistics.start()
    for _ in range(4):
        clock.now += 0.5  # lays out
        statistics.lap("host")
        clock.work(0.25, 4.0)
        statistics.lap("forward")
        clock.work(1.0, 0.125)
        statistics.lap("decode")
        clock.wait()
        statistics.lap("host", waited=True)
        clock.work(0.25, 0.125)
        statistics.lap("commit")
    assert sum(statistics.seconds.values()) == pytest.approx(clock.now - 5)
    if on_device:
        assert statistics.seconds["forward"] == pytest.approx(16)
        assert statistics.seconds["decode"] == pytest.approx(0.5)
        assert statistics.seconds["host"] == pytest.approx(2)
        assert len(clock.marks) <= 5, "marks of a step that is over are used again"
    else:
        assert statistics.seconds["forward"] == pytest.approx(1)
        assert statistics.seconds["decode"] == pytest.approx(4)


@pytest.mark.parametrize(
    ("accepted", "steps", "said"), [(0, 300, True), (1, 299, True), (8, 300, False), (0, 200, False)]
)
def test_drafts_in_vain_are_named(accepted: int, steps: int, said: bool) -> None:
    """As of masks that were never trained; not where few were tried."""
    work = Work()
    work.proposed[8], work.accepted[accepted] = steps, min(steps, 20)
    work.accepted[0] += steps - min(steps, 20)
    assert work.in_vain().startswith("of 2,") == said
    assert ("decode.draft_from=text" in work.in_vain()) == said
