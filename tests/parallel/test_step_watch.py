"""A step that the main thread never comes out of is noticed from outside, and one that it does come out of is not."""

from __future__ import annotations

import threading
import time

import pytest

from lopa_dist.parallel import step_watch
from lopa_dist.parallel.step_watch import StepWatch

LIMIT_S = 0.3


class Others:
    """The other ranks, as the store tells of them; and what the watch does to this process."""

    def __init__(self, announced: str | None = None, blamed: str | None = None) -> None:
        self.announced, self.blamed = announced, blamed
        self.asked: list[bool] = []
        self.noted: list[int] = []
        self.ended: list[str] = []
        self.gone = False
        self.over = threading.Event()

    def failed(self) -> str | None:
        if self.gone:
            raise RuntimeError("the store is gone")
        return self.announced

    def overdue(self, waits: bool) -> str | None:
        self.asked.append(waits)
        return self.blamed

    def end(self, verdict: str) -> None:
        self.ended.append(verdict)
        self.over.set()

    def watch(self) -> StepWatch:
        return StepWatch(LIMIT_S, self.failed, self.overdue, self.end, self.noted.append)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_watch, "INTERVAL_S", 0.02)


@pytest.mark.parametrize("waits", [False, True])
def test_a_part_that_does_not_end_names_who_is_to_blame(waits: bool) -> None:
    others = Others(blamed="rank 3")
    watch, began = others.watch(), time.monotonic()
    with watch.part(waits):
        assert others.over.wait(10)
    assert time.monotonic() - began >= LIMIT_S
    assert others.ended == ["rank 3"]
    assert others.asked == [waits]
    watch.close()


def test_what_another_rank_announced_is_not_waited_for_until_the_limit() -> None:
    others = Others(announced="rank 1: MemoryError")
    watch, began = others.watch(), time.monotonic()
    watch.limit_s = 1000
    with watch.part(True):
        assert others.over.wait(10)
    assert time.monotonic() - began < 10
    assert others.ended == ["rank 1: MemoryError"]
    watch.close()


def test_a_part_that_nobody_is_to_blame_for_may_take_long() -> None:
    others = Others()
    watch = others.watch()
    with watch.part(False):
        assert not others.over.wait(4 * LIMIT_S)
    assert len(others.asked) > 1
    watch.close()


def test_many_short_parts_and_the_time_between_them_are_not_watched() -> None:
    others = Others("rank 1: MemoryError", "rank 3")
    watch = others.watch()
    for _ in range(20):
        with watch.part(True):
            time.sleep(0.001)
        assert not others.over.wait(0.03)
    assert not others.over.wait(2 * LIMIT_S), "the consumer of results may take as long as it likes"
    assert others.noted[-1] == 20
    watch.close()


def test_an_error_in_a_part_ends_the_watching_of_it() -> None:
    others = Others(announced="rank 0: ValueError", blamed="rank 3")
    watch = others.watch()
    with pytest.raises(ValueError, match="own"), watch.part(True):
        raise ValueError("own")
    assert not others.over.wait(2 * LIMIT_S)
    watch.close()


def test_a_store_that_is_gone_is_left_to_the_heartbeat() -> None:
    others = Others(blamed="rank 3")
    others.gone = True
    watch = others.watch()
    with watch.part(True):
        assert not others.over.wait(2 * LIMIT_S)
        others.gone = False
        assert others.over.wait(10)
    watch.close()
