"""Answers are judged beside decoding: what a judge does with its time and its errors, and jobs whose programs hang."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lopa_dist.config import Config, JobConfig, LoggingConfig, ModelOptions, ParallelConfig, TaskConfig, WandbConfig
from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.request import Generation, Request
from lopa_dist.jobs.run import judging
from lopa_dist.jobs.run.job import run
from lopa_dist.jobs.run.judging import Answer, Judges, Verdict
from lopa_dist.jobs.show.report import accuracy_interval
from lopa_dist.parallel.launcher import World
from lopa_dist.parallel.stop import SIGNALS, Stopped
from lopa_dist.tasks import code_task
from lopa_dist.tasks.humaneval import HumanEval
from lopa_dist.tasks.registry import make_task
from lopa_dist.tasks.sandbox import NotRun, Outcome
from lopa_dist.tasks.task import CannotJudge, Item, Score

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
            (verdict,) = judges.verdicts()
            expected = text, Score(text == "right", threading.current_thread().name)
            assert (verdict.answer.text, verdict.score) == expected
    assert not judges.open


def test_nothing_is_waited_for_where_no_verdict_is_new() -> None:
    """A queue of Python 3.10's may wait for ever after some thousands of turns, in spite of its timeout."""
    judged, right = Future[Verdict](), Verdict(answer("right"), None)
    judged.set_result(right)
    with Judges(Quick(), 2) as judges:
        for _ in range(20_000):
            judges.open.add(judged)
            judges.finished.put(judged)
            assert list(judges.verdicts()) == [right]
            assert list(judges.verdicts()) == []


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
            found += [(verdict.answer.text, verdict.score) for verdict in judges.verdicts(10.0)]
    assert sorted((text, score is not None and score.correct) for text, score in found) == [
        ("right", True), ("right", True), ("wrong", False),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", [Quick, Slow])
def test_what_could_not_be_judged_is_told_from_what_is_wrong(
    kind: type[Quick], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "PAUSES_S", (0.0, 0.0))
    task = kind()
    if isinstance(task, Slow):
        task.may.set()
    with Judges(task, 1) as judges:
        for text in ("broken", "wrong"):
            judges.submit(answer(text))
        found = {}
        while judges.open:
            found |= {one.answer.text: (one.score and one.score.correct, one.failure) for one in judges.verdicts(10.0)}
    assert found == {"broken": (None, "ArithmeticError: a judge broke"), "wrong": (False, "")}


def test_what_fails_for_a_moment_is_judged_after_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "PAUSES_S", (0.0, 0.0))
    task, failures = Slow(), [OSError("no process"), MemoryError()]
    task.may.set()

    def score(item: Item, text: str) -> Score:
        if failures:
            raise failures.pop()
        return Score(True, text)

    monkeypatch.setattr(task, "score", score)
    with Judges(task, 1) as judges:
        judges.submit(answer("right"))
        found = [one for _ in range(9) for one in judges.verdicts(5.0 if judges.open else 0.0)]
    assert [(one.score, one.failure) for one in found] == [(Score(True, "right"), "")]


def test_a_task_that_can_judge_nothing_ends_the_job() -> None:
    class Unable(Quick):
        def score(self, item: Item, text: str) -> Score | None:
            raise CannotJudge("no metric")

    with Judges(Unable(), 1) as judges, pytest.raises(CannotJudge, match="no metric"):
        judges.submit(answer("right"))


@linux
@pytest.mark.usefixtures("sandbox_to_itself")
def test_programs_that_could_not_be_run_are_counted_apart_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "PAUSES_S", ())
    config, real = code_job(tmp_path, [PASSES, FAILS, PASSES], timeout_s=5), code_task.run_tests
    with monkeypatch.context() as patch:

        def short(solution: str, *more: Any) -> Outcome:
            if "return 2" in solution:
                raise NotRun("no process to be had")
            return real(solution, *more)

        patch.setattr(code_task, "run_tests", short)
        report = run(config, tmp_path, World("python"))
    assert (report["requests"], report["unjudged"], report["judged"], report["accuracy"]) == (3, 1, 2, 1.0)
    assert accuracy_interval(report) == accuracy_interval({"accuracy": 1.0, "requests": 2, "errors": 0})
    assert [(line["correct"], line.get("unjudged")) for line in lines(tmp_path)] == [
        (True, None), (None, "NotRun: no process to be had"), (True, None),
    ]  # fmt: skip
    assert "1 answers: judging failed" in (tmp_path / "report.html").read_text()
    report = run(config, tmp_path, World("python"))
    assert (report["requests"], report["judged"], report["accuracy"]) == (3, 3, 2 / 3)
    assert "unjudged" not in report
    assert [line["correct"] for line in lines(tmp_path)] == [True, False, True]


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
        logging=LoggingConfig(progress="never", wandb=WandbConfig(mode="disabled")),
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


@linux
@pytest.mark.usefixtures("sandbox_to_itself")
def test_an_error_message_that_no_encoding_has_is_a_wrong_answer_s(tmp_path: Path) -> None:
    broken = "raise Exception('\\ud800')\ndef f(): pass\n#"
    report = run(code_job(tmp_path, [PASSES, broken, PASSES], timeout_s=5), tmp_path, World("python"))
    assert [(line["correct"], line.get("reason")) for line in lines(tmp_path)] == [
        (True, None), (False, "Exception: \ufffd"), (True, None),
    ]  # fmt: skip
    assert report["accuracy"] == 2 / 3


def test_a_problem_that_is_there_twice_is_two_requests(tmp_path: Path) -> None:
    config = code_job(tmp_path, [PASSES, FAILS], timeout_s=5)
    file = Path(str(config.task.input))
    file.write_text(file.read_text() + file.read_text() + file.read_text().splitlines()[0] + "\n")
    config = replace(config, task=replace(config.task, allow_code_execution=False))
    report = run(config, tmp_path, World("python"))
    assert (report["requests"], report["prompts"]) == (5, 2)  # several answers to a problem are no independent ones
    assert [line["custom_id"] for line in lines(tmp_path)] == ["HE/0#0", "HE/1#0", "HE/0#1", "HE/1#1", "HE/0#2"]
    assert [line["sample"] for line in lines(tmp_path)] == [0, 0, 1, 1, 2]
