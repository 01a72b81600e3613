"""Lists on disk give back what was put in."""

from __future__ import annotations

import os
import random
from array import array
from functools import lru_cache
from pathlib import Path

import pytest

from lopa_dist.engine.request import Request
from lopa_dist.jobs.run.spool import BLOCK, KEPT, Chosen, Spool
from lopa_dist.tasks.task import Item, Origin, RequestSampling


@pytest.mark.parametrize("kinds", [(), (Item, Origin, RequestSampling, Request)])
@pytest.mark.parametrize("count", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, (KEPT + 3) * BLOCK + 7])
def test_values_come_back_in_any_order(count: int, kinds: tuple[type, ...]) -> None:
    values = [
        Item(f"a{n}", origin=Origin(n, "ä"), sampling=RequestSampling(seed=n), stop=("x",), reference={n: None})
        if n % 2
        else Request(n, array("i", range(n % 7)), 5, 2**62 + n)
        for n in range(count)
    ]
    spool: Spool[Item | Request] = Spool(*kinds)
    for value in values:
        spool.append(value)
    assert len(spool) == count
    assert list(spool) == values
    assert [spool[n] for n in range(count - 1, -1, -7)] == values[::-7]
    assert [getattr(value, "reference", None) for value in spool] == [getattr(v, "reference", None) for v in values]
    for wrong in (-1, count):
        with pytest.raises(IndexError):
            spool[wrong]
    assert list(Chosen[Item](spool, range(0, count, 3))) == values[::3]


def test_its_file_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    spool: Spool[int] = Spool()
    for n in range(2 * BLOCK):
        spool.append(n)
    assert os.fstat(spool.file.fileno()).st_size > 0
    assert not list(tmp_path.iterdir())
    assert spool[3] == 3


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    spool: Spool[int] = Spool()
    spool.file = open("/dev/full", "r+b", buffering=0)  # noqa: SIM115
    for n in range(BLOCK - 1):
        spool.append(n)
    with pytest.raises(OSError, match=str(tmp_path)):
        spool.append(0)


def test_what_is_read_in_any_order_is_read_once() -> None:
    """Requests with limits of their own begin in another order than they are stored in."""
    spool: Spool[tuple[int, int]] = Spool()
    for number in range(20 * BLOCK):
        spool.append((number, -number))
    read: list[int] = []

    def block(number: int) -> list[tuple[int, int]]:
        read.append(number)
        return spool.read(number)

    spool.block = lru_cache(KEPT)(block)
    numbers = list(range(0, len(spool), 7))
    random.Random(0).shuffle(numbers)
    assert sorted(Chosen(spool, numbers).in_any_order()) == sorted((n, -n) for n in numbers)
    assert read == list(range(20))
