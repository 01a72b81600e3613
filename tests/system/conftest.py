"""What many of the tests compare with, made once: the texts of one process; and a look at what they leave behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lopa_dist.composing import composed
from lopa_dist.jobs.run.job import run
from lopa_dist.parallel.launcher import World
from tests.system import forked

ROOT = Path(__file__).parents[2]
MARK = "LOPA_TESTS_OF"
QUIET = ["logging.wandb.mode=disabled", "logging.progress=never", "parallel.threads=1"]
REQUESTS = 24  # of `plain`
Lines = list[dict[str, Any]]


def alone(folder: Path, *overrides: str) -> Lines:
    """The result lines of a job in this process, without what depends on time."""
    run(composed([*QUIET, *overrides]), folder, World("python"))
    return results(folder)


def results(folder: Path) -> Lines:
    """The result lines of a run, without what depends on time."""
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "latency_s"} for line in lines]


def entries(folder: Path, parts: str = "*") -> int:
    """How many lines the journal of a run has, or those of its parts."""
    return sum(part.read_bytes().count(b"\n") for part in folder.glob(f"journal/{parts}.jsonl"))


@pytest.fixture(scope="package", autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """No process that the tests started, however indirectly, runs when they are over: all inherit a mark."""
    os.environ[MARK] = str(os.getpid())
    yield
    forked.stop()
    mark = f"{MARK}={os.environ.pop(MARK)}".encode()
    end = time.monotonic() + 15
    while (left := marked(mark)) and time.monotonic() < end:
        time.sleep(0.1)
    for process in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    assert not left, f"still running, and ended now: {left}"


def marked(mark: bytes) -> dict[int, str]:
    """Processes whose environment has `mark`, and their command lines. Empty where there is no /proc."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            if int(place.name) != forked.helper() and mark in (place / "environ").read_bytes().split(b"\0"):
                found[int(place.name)] = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return found


@pytest.fixture(scope="session")
def lookahead(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    """12 requests with 3 branches; those of fewer requests are the first of them."""
    return alone(tmp_path_factory.mktemp("lookahead"), "task.limit=12", "decode.branches=3")


@pytest.fixture(scope="session")
def one_process(lookahead: Lines) -> list[str]:
    """Their texts."""
    return [line["text"] for line in lookahead]


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    """Many short requests without branches, for jobs that are stopped on the way."""
    return alone(tmp_path_factory.mktemp("plain"), f"task.limit={REQUESTS}", "decode=embedded_plain")
