"""What a job can do without: it is done beside the job, and lost with one warning where it fails or hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from lopa_dist.jobs.show.extra import Extra


def broken() -> None:
    raise OSError("no room")


def test_acts_are_done_in_turn_and_the_last_one_is_waited_for() -> None:
    extra, done = Extra("it is lost", 10.0), list[int]()
    for number in range(3):
        extra.post(lambda number=number: done.append(number))  # type: ignore[misc]
    assert extra.wait(lambda: list(done)) == [0, 1, 2]
    extra.close()


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_what_fails_or_hangs_is_lost_with_one_warning(how: str, caplog: pytest.LogCaptureFixture) -> None:
    abandoned, hanging = list[str](), threading.Event()
    extra = Extra("it is lost", 0.1, lambda: abandoned.append("abandoned"))
    act: Callable[[], Any] = broken if how == "fails" else hanging.wait
    began = time.monotonic()
    assert extra.wait(act) is None
    assert [extra.wait(lambda: 1), extra.post(lambda: 1)] == [None, None]
    assert time.monotonic() - began < 5
    why = "OSError: no room" if how == "fails" else "no answer for 0.1 s"
    assert [record.message for record in caplog.records] == [f"WARNING: it is lost: {why}. The job goes on without it."]
    assert abandoned == ["abandoned"]
    hanging.set()


def test_posting_to_what_hangs_does_not_pile_up() -> None:
    extra, hanging = Extra("it is lost", 0.1), threading.Event()
    extra.post(hanging.wait)
    end = time.monotonic() + 5
    while not extra.lost and time.monotonic() < end:
        extra.post(lambda: None)
        time.sleep(0.02)
    assert extra.lost
    hanging.set()
