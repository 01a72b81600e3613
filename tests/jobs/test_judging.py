"""Answers are judged beside decoding: what a judge does with its time and its errors, and jobs whose programs hang."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lopa_dist.config import (
    Config,
    JobConfig,
    LoggingConfig,
    ModelOptions,
    ParallelConfig,
    TaskConfig,
    WandbConfig,
)
from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.request import Generation, Request
from lopa_dist.jobs.judging import Answer, Judges
from lopa_dist.jobs.run import run
from lopa_dist.parallel.launcher import World
from lopa_dist.parallel.stop import SIGNALS, Stopped
from lopa_dist.tasks.humaneval import HumanEval
from lopa_dist.tasks.registry import make_task
from lopa_dist.tasks.task import Item, Score

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox needs Linux")


class Quick:
    """Judges where it is asked to; a text is right if it says so."""

    name = "quick"

    def items(self) -> Iterable[Item]:
        return ()

    def score(self, item: Item, text: str) -> Score | None:
        if text == "broken":
            raise ArithmeticError("a judge broke")
        return Score(text == "right", threading.current_thread().name)


class Slow(Quick):
    """Judges when it may."""

    def __init__(self) -> None:
        self.may, self.cancelled = threading.Event(), False

    def score(self, item: Item, text: str) -> Score | None:
        assert self.may.wait(60)
        if self.cancelled:
            raise InterruptedError
        return super().score(item, text)

    def cancel(self) -> None:
        self.cancelled = True
        self.may.set()


def answer(text: str) -> Answer:
    generation = Generation(Request(0, [1], 9, 0), [], "stop", 1, 1.0, 0.1, 0)
    return Answer(Item("a", prompt="x"), generation, text, 0.0)


def test_quick_tasks_are_judged_at_once_in_the_caller_s_thread() -> None:
    """Where no entry waits for a step."""
    with Judges(Quick(), 2) as judges:
        for text in ("right", "wrong"):
            judges.submit(answer(text))
            ((given, score),) = judges.verdicts()
            assert (given.text, score) == (text, Score(text == "right", threading.current_thread().name))
        with pytest.raises(ArithmeticError):
            judges.submit(answer("broken"))
    assert not judges.open


def test_slow_tasks_are_judged_beside() -> None:
    task = Slow()
    with Judges(task, 2) as judges:
        for text in ("right", "wrong", "right"):
            judges.submit(answer(text))
        assert list(judges.verdicts()) == []
        assert len(judges.open) == 3
        task.may.set()
        found = []
        while judges.open:
            found += [(given.text, score) for given, score in judges.verdicts(10.0)]
    assert sorted((text, score is not None and score.correct) for text, score in found) == [
        ("right", True), ("right", True), ("wrong", False),
    ]  # fmt: skip


def test_an_error_of_a_judge_surfaces() -> None:
    task = Slow()
    task.may.set()
    with Judges(task, 1) as judges:
        judges.submit(answer("broken"))
        with pytest.raises(ArithmeticError, match="a judge broke"):
            list(judges.verdicts(10.0))


def test_what_is_not_judged_is_given_up() -> None:
    task = Slow()
    with Judges(task, 1) as judges:
        for _ in range(3):
            judges.submit(answer("right"))
    assert task.cancelled
    assert len(judges.open) == 3
    assert not any(thread.name.startswith("judge") for thread in threading.enumerate())


HANGS, PASSES, FAILS = "while True: pass\n#", "def f(): return 1\n#", "def f(): return 2\n#"


@pytest.fixture
def own_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def code_job(folder: Path, beginnings: list[str], timeout_s: float, **job: Any) -> Config:
    """Programs that begin thus; what the embedded model adds to them is, or follows, a comment."""
    file = folder / "programs.jsonl"
    test = "def check(f):\n    assert f() == 1"
    rows = [
        {"task_id": f"HE/{n}", "prompt": text, "entry_point": "f", "test": test, "canonical_solution": ""}
        for n, text in enumerate(beginnings)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Config(
        task=TaskConfig("humaneval", None, str(file), allow_code_execution=True, code_timeout_s=timeout_s),
        model=ModelOptions(chat_template="never"),
        decode=DecodeConfig(verify="confidence", drafts=0, branches=2, block_size=16, max_new_tokens=16),
        engine=EngineConfig(max_sequences=2),
        parallel=ParallelConfig(threads=1),
        job=JobConfig(**job),
        logging=LoggingConfig(progress="never", plots=False, wandb=WandbConfig(mode="disabled")),
    )


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


@linux
@pytest.mark.usefixtures("sandbox_to_itself")
def test_programs_that_hang_take_no_time_from_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the verdicts are those that the task gives, in the order of the input."""
    config = code_job(tmp_path, [HANGS, PASSES, HANGS, FAILS, PASSES], timeout_s=1.5)
    submitted, all_generated = [], threading.Event()
    submit, score = Judges.submit, HumanEval.score

    def noted(self: Judges, answer: Answer) -> None:
        submit(self, answer)
        submitted.append(answer)
        if len(submitted) == 5:
            all_generated.set()

    def late(self: HumanEval, item: Item, text: str) -> Score | None:
        assert all_generated.wait(60), "decoding waits for a verdict"
        return score(self, item, text)

    with monkeypatch.context() as patch:
        patch.setattr(Judges, "submit", noted)
        patch.setattr(HumanEval, "score", late)
        report = run(config, tmp_path, World("python"))
    assert report["wall_s"] - report["decode_s"] > 3.0
    assert report["tokens_per_s"]["job"] == report["completion_tokens"] / report["decode_s"]
    task = make_task(config.task)
    found = lines(tmp_path)
    for item, line in zip(task.items(), found, strict=True):
        score = task.score(Item(item.custom_id, prompt=item.prompt, reference=item.reference), line["text"])
        assert score is not None
        assert (line["custom_id"], line["correct"], line.get("reason", "")) == (
            item.custom_id, score.correct, score.reason,
        )  # fmt: skip
    assert [line.get("reason", "").split(":")[0] for line in found[::2]] == ["TimeoutError", "TimeoutError", ""]
    assert found[3]["reason"] == "AssertionError: "


@linux
@pytest.mark.usefixtures("sandbox_to_itself", "own_handlers")
def test_a_stop_keeps_the_verdicts_that_there_are(tmp_path: Path) -> None:
    beginnings = [PASSES, PASSES, *[HANGS] * 5]
    asked: list[float] = []

    def ask() -> None:
        while sum(part.read_bytes().count(b"\n") for part in tmp_path.glob("journal/*.jsonl")) < 2:
            time.sleep(0.05)
        asked.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask, daemon=True).start()
    with pytest.raises(Stopped, match="SIGTERM"):
        run(code_job(tmp_path, beginnings, timeout_s=1.5, grace_s=1), tmp_path, World("python"))
    assert 1 <= time.monotonic() - asked[0] < 5  # one after the other, the hanging programs take longer
    some = lines(tmp_path)
    assert [(line["custom_id"], line["correct"]) for line in some] == [("HE/0", True), ("HE/1", True)]
    report = run(code_job(tmp_path, beginnings, timeout_s=1.5), tmp_path, World("python"))
    assert (report["requests"], report["attempts"]) == (7, 2)
    all_of_them = lines(tmp_path)
    assert all_of_them[:2] == some
    assert {line["reason"] for line in all_of_them[2:]} == {"TimeoutError: no result within 1.5 s"}
