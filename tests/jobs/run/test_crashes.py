"""A request that ends the process is set aside and all others are answered; what failed can be run again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lopa_dist.config import Config, JobConfig, TaskConfig
from lopa_dist.decode import FAILED
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.running_batch import Leaving, RunningBatch
from lopa_dist.jobs.folder.journal import Writer
from lopa_dist.jobs.run.answers import NOT_NUMBERS
from lopa_dist.jobs.run.crashes import Begun, crashes
from lopa_dist.jobs.run.job import run
from lopa_dist.jobs.show.run_state import state_of
from lopa_dist.own_code import load
from lopa_dist.parallel.launcher import RankError, World
from lopa_dist.parallel.stop import Stop, Stopped
from tests.jobs.folder.test_packed import ids_of
from tests.jobs.run.test_job import config, lines
from tests.jobs.test_resumed_figures import Killed, killed_after

POISON = 4


class Crash(BaseException):
    """Ends a process wherever it is, without a word."""


def job(**options: Any) -> Config:
    made = config(TaskConfig(limit=9), max_new_tokens=32)
    return replace(made, engine=EngineConfig(max_sequences=3), job=JobConfig(**options))


def crashing(running: list[list[int]], poison: int = POISON) -> Callable[..., Any]:
    """`RunningBatch.schedule` that crashes where the poison runs, and notes who runs."""
    schedule = RunningBatch.schedule

    def scheduled(self: RunningBatch) -> Any:
        names = [admission.request.index for admission in self.running.values()]
        running.append(names)
        if poison in names:
            raise Crash
        return schedule(self)

    return scheduled


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    run(job(), folder, World("python"))
    return lines(folder)


def same(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> bool:
    return [(a["custom_id"], a["text"]) for a in found] == [(b["custom_id"], b["text"]) for b in wanted]


def test_the_poison_is_found_and_the_job_comes_to_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: list[dict[str, Any]]
) -> None:
    running: list[list[int]] = []
    with monkeypatch.context() as patch:
        patch.setattr(RunningBatch, "schedule", crashing(running))
        for _ in range(2):
            with pytest.raises(Crash):
                run(job(), tmp_path, World("python"))
        assert running[-1] == [POISON], "alone, when all others are done"
        report = run(job(), tmp_path, World("python"))
    assert (report["requests"], report["errors"], report["attempts"]) == (9, 1, 3)
    assert max(map(len, running)) == 3
    found = lines(tmp_path)
    assert found[4]["finish_reason"] == "error"
    assert "ended 2 times while this request ran" in found[4]["error"]
    assert same(found[:4] + found[5:], undisturbed[:4] + undisturbed[5:])
    assert run(job(), tmp_path, World("python")) == report, "there is nothing left to do"

    report = run(job(retry="errors"), tmp_path, World("python"))
    assert (report["errors"], report["attempts"]) == (0, 4)
    assert same(lines(tmp_path), undisturbed)
    assert run(job(), tmp_path, World("python"))["errors"] == 0


def test_a_crash_is_never_blamed_where_nobody_wants_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[list[int]] = []
    monkeypatch.setattr(RunningBatch, "schedule", crashing(running))
    for _ in range(4):
        with pytest.raises(Crash):
            run(job(crashes=None), tmp_path, World("python"))


def test_a_request_that_failed_before_it_was_set_aside_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: list[dict[str, Any]]
) -> None:
    generation = RunningBatch.generation

    def failing(self: RunningBatch, slot: int, answer: list[int], leaving: Leaving) -> Any:
        if leaving.ended[slot].request.index == POISON:
            leaving.host.done[slot] = FAILED
        return generation(self, slot, answer, leaving)

    with monkeypatch.context() as patch:
        patch.setattr(RunningBatch, "generation", failing)
        assert run(job(), tmp_path, World("python"))["errors"] == 1
    with monkeypatch.context() as patch:
        patch.setattr(RunningBatch, "schedule", crashing([]))
        with pytest.raises(Crash):
            run(job(retry="errors"), tmp_path, World("python"))
    # what a launcher starts again
    monkeypatch.setattr("lopa_dist.parallel.launcher.Start.again", lambda *_: True)
    report = run(job(retry="errors", crashes=1), tmp_path, World("python"))
    assert (report["requests"], report["errors"]) == (9, 1)
    found = lines(tmp_path)
    assert "the process ended once while this request ran; it was set aside" in found[POISON]["error"]
    assert same(found[:POISON] + found[POISON + 1 :], undisturbed[:POISON] + undisturbed[POISON + 1 :])


def test_what_a_stop_leaves_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, stop = Writer.write, Stop(grace_s=60.0)

    def stopping(self: Writer, *entries: dict[str, Any]) -> None:
        write(self, *entries)
        stop.ask("SIGTERM")

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "write", stopping)
        with pytest.raises(Stopped, match="the results so far are kept"):
            run(job(), tmp_path, World("python"), stop)
    found, done = state_of(tmp_path), len(lines(tmp_path))
    assert 0 < done < 9
    assert (found.state, found.done, found.open) == ("stopped", done, 9 - done)


def test_a_retry_that_was_stopped_or_killed_is_not_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: list[dict[str, Any]]
) -> None:
    generation = RunningBatch.generation

    def failing(self: RunningBatch, slot: int, *rest: Any) -> Any:
        self.host.done[slot] = FAILED
        return generation(self, slot, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(RunningBatch, "generation", failing)
        assert run(job(), tmp_path, World("python"))["errors"] == 9
    write = Writer.write

    def stopping(self: Writer, *entries: dict[str, Any]) -> None:
        write(self, *entries)
        stop.ask("SIGTERM")

    stop = Stop(grace_s=60.0)
    with monkeypatch.context() as patch:
        patch.setattr(Writer, "write", stopping)
        with pytest.raises(Stopped, match="the results so far are kept"):
            run(job(retry="errors"), tmp_path, World("python"), stop)
    found = state_of(tmp_path)
    done = sum(line["finish_reason"] != "error" for line in lines(tmp_path))
    assert 0 < done < 9
    assert (found.state, found.done, found.open) == ("stopped", done, 9 - done)

    monkeypatch.setattr("lopa_dist.parallel.launcher.Start.again", lambda *_: True)
    with monkeypatch.context() as patch:
        patch.setattr(Writer, "write", killed_after(1))
        with pytest.raises(Killed):
            run(job(retry="errors"), tmp_path, World("python"))
    report = run(job(), tmp_path, World("python"))  # errors are results: nothing is left to run
    found_lines = lines(tmp_path)
    assert report["errors"] == sum(line["finish_reason"] == "error" for line in found_lines) == 9 - done - 1
    assert state_of(tmp_path).state == "complete"
    assert run(job(), tmp_path, World("python")) == report
    assert run(job(retry="errors"), tmp_path, World("python"))["errors"] == 0
    assert same(lines(tmp_path), undisturbed)


def test_errors_alone_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: list[dict[str, Any]]
) -> None:
    """With another precision, too, which the line then tells; what fails again remains an error."""
    generation, admit, admitted = RunningBatch.generation, RunningBatch.admit, set[int]()

    def failing(*which: int) -> Callable[..., Any]:
        def found(self: RunningBatch, slot: int, answer: list[int], leaving: Leaving) -> Any:
            if leaving.ended[slot].request.index in which:
                leaving.host.done[slot] = FAILED
            return generation(self, slot, answer, leaving)

        return found

    def noted(self: RunningBatch) -> None:
        admit(self)
        admitted.update(admission.request.index for admission in self.running.values())

    monkeypatch.setattr(RunningBatch, "admit", noted)
    monkeypatch.setattr(RunningBatch, "generation", failing(2, 5, 7))
    assert run(job(), tmp_path, World("python"))["errors"] == 3
    assert run(job(), tmp_path, World("python"))["errors"] == 3
    admitted.clear()
    monkeypatch.setattr(RunningBatch, "generation", failing(5))
    report = run(job(retry="errors"), tmp_path, World("python"))
    assert admitted == {2, 5, 7}
    assert report["errors"] == 1
    found = lines(tmp_path)
    assert found[5]["error"] == NOT_NUMBERS
    assert same(found[:5] + found[6:], undisturbed[:5] + undisturbed[6:])

    settings = tmp_path / "journal" / "settings.json"
    first = json.loads(settings.read_text())
    first["model"]["dtype"] = "fp16"
    settings.write_text(json.dumps(first))
    with pytest.raises(ValueError, match=r"model\.dtype was 'fp16', is 'fp32'"):
        run(job(), tmp_path, World("python"))
    monkeypatch.setattr(RunningBatch, "generation", generation)
    admitted.clear()
    assert run(job(retry="errors"), tmp_path, World("python"))["errors"] == 0
    assert admitted == {5}
    found = lines(tmp_path)
    assert found[5]["retried_with"] == ["model.dtype was 'fp16', is 'fp32'"]
    assert not any("retried_with" in line for line in found[:5] + found[6:])
    assert same(found, undisturbed)


@pytest.mark.parametrize(
    ("error", "lone", "kept"),
    [
        (None, True, False),
        (Stopped("stopped by SIGTERM"), True, False),
        (KeyboardInterrupt(), True, False),
        (OSError("disk full"), True, False),
        (RankError("rank 1 of 2 does not answer"), True, False),
        (RankError("rank 1 of 2 does not answer"), False, True),
        (RuntimeError("out of memory"), True, True),
        (Crash(), True, True),
    ],
)
def test_what_counts_as_a_crash(tmp_path: Path, error: BaseException | None, lone: bool, kept: bool) -> None:
    for attempt in (1, 2, 3):
        begun = Begun(tmp_path, attempt, 0, lone)
        begun.note(*(["a", "b", "c"] if attempt < 3 else ["b", "x"]))
        begun.note("c", ended=True)
        begun.__exit__(type(error), error, None)
    ids, done = ids_of("a", None, "b", "c"), bytearray(4)
    assert crashes(tmp_path, ids, done, 0) == bytearray([2 * kept, 0, 3 * kept, 0])
    assert crashes(tmp_path, ids, done, 2) == bytearray([kept, 0, 2 * kept, 0])
    done[2] = 1
    assert crashes(tmp_path, ids, done, 0) == bytearray([2 * kept, 0, 0, 0])


def test_an_error_of_own_code_is_no_crash(tmp_path: Path) -> None:
    """Nor is one that was raised from it."""
    (tmp_path / "mine.py").write_text("def fill(*_):\n    raise KeyError('x')\n")
    own = load(f"{tmp_path}/mine.py:fill", "decode.fill")

    def wrapped() -> None:
        try:
            own()
        except KeyError as error:
            raise RuntimeError("verify failed") from error

    for failing in (own, wrapped):
        begun = Begun(tmp_path, 1, 0, lone=True)
        begun.note("a")
        with pytest.raises((KeyError, RuntimeError)), begun:
            failing()
        assert not list(tmp_path.glob("*.begun"))
