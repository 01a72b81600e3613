"""Stages that go wrong, each in a way that a GPU has, for the test of `gpu_first`."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.first_facts import Fact, Making, StageOf, main


def before() -> dict[str, Any]:
    return {"number": 7}


def crash(device: torch.device) -> Iterator[Fact]:
    def illegal_access() -> dict[str, Any]:
        ctypes.string_at(0)
        return {}

    yield "weights", Making(before)
    yield "before", before
    yield "illegal access", illegal_access
    yield "after", before


def gpu(device: torch.device) -> Iterator[Fact]:
    def bad_access() -> dict[str, Any]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    yield "bad access", bad_access
    yield "after", before


def hang(device: torch.device) -> Iterator[Fact]:
    def endless() -> dict[str, Any]:
        while True:
            time.sleep(1)

    yield "before", before
    yield "endless", endless


def memory(device: torch.device) -> Iterator[Fact]:
    print("5\nwarning: not of this program")
    yield "too large", lambda: {"sum": float(torch.ones(1 << 60).sum())}
    yield "after", before


STAGES: dict[str, StageOf] = {"crash": crash, "hang": hang, "memory": memory, "gpu": gpu}

if __name__ == "__main__":
    main(STAGES)
