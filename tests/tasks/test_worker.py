"""Children that answer questions: in turn, at once, when they die, and when the parent does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest

from lopa_dist.tasks import worker
from lopa_dist.tasks.task import Cancelled
from lopa_dist.tasks.worker import Lost, TooLong, Workers

MODULE = "tests.tasks.answering"


@pytest.fixture
def workers() -> Iterator[Workers]:
    found = Workers(MODULE, 20.0)
    yield found
    found.end()


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def gone(pid: int, within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


def test_one_child_answers_all_that_is_asked_in_turn(workers: Workers) -> None:
    texts = ["", "a\nb", "\u2028 \r é \udc80", "x" * 300_000]
    answers = [workers.ask({"echo": text, "print": True}) for text in texts]
    assert [text for _, text in answers] == texts
    assert len({pid for pid, _ in answers}) == 1


def test_threads_have_a_child_each(workers: Workers) -> None:
    with ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(workers.ask, [{"echo": i, "sleep": 0.3} for i in range(9)]))
    assert [i for _, i in answers] == list(range(9))
    assert len({pid for pid, _ in answers}) == len(workers.all) <= 3


def test_signals_for_the_job_are_not_for_its_workers(workers: Workers) -> None:
    pid, _ = workers.ask({})
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        assert workers.ask({"signal": number}) == [pid, None]


def test_one_that_was_killed_is_replaced(workers: Workers, tmp_path: Path) -> None:
    assert workers.ask({"once": str(tmp_path / "killed"), "echo": 5})[1] == 5
    pid, _ = workers.ask({})
    os.kill(pid, signal.SIGKILL)
    assert gone(pid)
    assert workers.ask({"echo": 6})[1] == 6


def test_one_that_cannot_be_started_is_lost(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a user may have no more processes, too."""
    failing = mock.Mock(side_effect=BlockingIOError(11, "Resource temporarily unavailable"))
    monkeypatch.setattr(worker.subprocess, "Popen", failing)
    with pytest.raises(Lost, match=r"cannot be started .*temporarily unavailable"):
        workers.ask({})
    monkeypatch.undo()
    assert workers.ask({})


def test_a_question_that_kills_is_given_up(workers: Workers) -> None:
    with pytest.raises(Lost, match="ended with status -9"):
        workers.ask({"signal": signal.SIGKILL})
    assert workers.ask({"echo": 7})[1] == 7
    assert len(workers.all) == 1


def test_a_question_that_takes_too_long_is_given_up_at_once() -> None:
    workers = Workers(MODULE, 1.0)
    began = time.monotonic()
    with pytest.raises(TooLong, match="took more than 1 s"):
        workers.ask({"sleep": 60})
    assert time.monotonic() - began < 10
    assert not workers.all


def test_who_waits_when_it_ends_gets_an_answer(workers: Workers) -> None:
    pid, _ = workers.ask({})
    found: list[str] = []

    def wait() -> None:
        with pytest.raises(Cancelled):
            workers.ask({"sleep": 60})
        found.append("cancelled")

    thread = threading.Thread(target=wait)
    thread.start()
    while workers.idle:
        time.sleep(0.01)
    time.sleep(0.1)
    workers.end()
    thread.join(10)
    assert found == ["cancelled"]
    assert gone(pid)
    with pytest.raises(Cancelled):
        workers.ask({})


def test_a_child_ends_with_its_parent_however_that_ends() -> None:
    program = (
        "import sys, time\n"
        "from lopa_dist.tasks.worker import Workers\n"
        f"workers = Workers({MODULE!r}, 20.0)\n"
        "print(workers.ask({})[0], flush=True)\n"
        "time.sleep(60)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), *sys.path]))}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert alive(child)
        parent.kill()
    assert gone(child)
