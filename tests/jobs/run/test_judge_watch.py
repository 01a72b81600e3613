"""A judge of the user's own that hangs is named, and does not keep a job that was told to stop."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest

from lopa_dist.config import TaskConfig
from lopa_dist.jobs.run import judge_watch
from lopa_dist.jobs.run.job import run
from lopa_dist.jobs.run.judge_watch import JudgeWatch
from lopa_dist.parallel.launcher import World
from lopa_dist.parallel.stop import STOPPED, Stop
from tests.jobs.run.test_job import config

HANGS = """
def score(text, fields):
    if fields["who"] == "Ann":
        import own_hang
        own_hang.wait()
    return True
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("LOOK_S", "LONG_S", "SLOW_S"):
        monkeypatch.setattr(judge_watch, key, 0.01)


def test_an_answer_that_takes_long_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    with JudgeWatch(Stop(60)) as watch:
        for request in ("one", "two"):
            with watch.judging(request):
                while request not in caplog.text:
                    threading.Event().wait(0.01)
                threading.Event().wait(0.1)
    assert [record.message.split(" takes ")[0] for record in caplog.records] == [
        "WARNING: judging the answer to one", "WARNING: judging the answer to two",
    ]  # fmt: skip


@pytest.mark.parametrize("grace_s", [0.0, 60.0])
def test_it_is_left_only_when_the_job_must_leave(monkeypatch: pytest.MonkeyPatch, grace_s: float) -> None:
    ended, done = list[tuple[str, int]](), threading.Event()
    monkeypatch.setattr(judge_watch, "die", lambda message, status: (ended.append((message, status)), done.set()))
    stop, acts = Stop(grace_s), list[str]()
    stop.ask("SIGTERM")
    with JudgeWatch(stop, [lambda: 1 / 0, lambda: acts.append("written")]) as watch, watch.judging("one"):
        done.wait(10 if not grace_s else 0.2)
    if grace_s:
        assert not ended
        return
    [(message, status)] = ended
    assert message.startswith("lopa-dist: stopped by SIGTERM while the answer to one was judged, for ")
    assert (status, acts) == (STOPPED, ["written"]), "an act that fails keeps no other from its work"


def test_a_job_whose_judge_hangs_can_be_stopped_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = ["Tom has 3 apples .", "Ann has 9 eggs .", "Sam has 2 cats ."]
    (tmp_path / "in.jsonl").write_text(
        "".join(json.dumps({"prompt": p, "max_tokens": 8, "who": p[:3]}) + "\n" for p in prompts)
    )
    own, stop = tmp_path / "own.py", Stop(0.0)
    asked = config(TaskConfig(name="batch", input=str(tmp_path / "in.jsonl"), score=f"{own}:score"))
    own.write_text(HANGS)

    class Left(BaseException):
        """In place of the process's end."""

    left = threading.Event()

    def wait() -> None:
        stop.ask("SIGTERM")
        assert left.wait(60)
        raise Left

    module = ModuleType("own_hang")
    module.wait = wait  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_hang", module)
    monkeypatch.setattr(judge_watch, "die", lambda *_: left.set())
    with pytest.raises(Left):
        run(asked, tmp_path / "run", World("python"), stop)
    assert not list((tmp_path / "run" / "journal").glob("*.begun")), "no request is suspected of a crash"
    module.wait = lambda: None  # type: ignore[attr-defined]
    report = run(asked, tmp_path / "run", World("python"))
    assert (report["requests"], report["judged"]) == (3, 3)
