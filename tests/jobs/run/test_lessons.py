"""A job that learns from its own answers: the same results, and what was learned is told and kept."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lopa_dist.config import Config, JobConfig, LoggingConfig, WandbConfig
from lopa_dist.decode import DecodeConfig
from lopa_dist.jobs.folder.lessons_file import lessons_in
from lopa_dist.jobs.run import lessons
from lopa_dist.jobs.run.job import run
from lopa_dist.jobs.run.lesson_outcome import Outcome
from lopa_dist.jobs.run.lessons import Lessons
from lopa_dist.jobs.setup.build import EngineBuilder
from lopa_dist.jobs.show.lessons import lesson_sentence
from lopa_dist.learn import learning as learning_of_a_job
from lopa_dist.learn.config import LearnConfig
from lopa_dist.learn.learning import Learning
from lopa_dist.learn.predictions import Reached
from lopa_dist.learn.trainer import FailedElsewhere, LearningFailed, Trainer
from lopa_dist.models.files import CheckpointError
from lopa_dist.parallel.group import Group
from lopa_dist.parallel.launcher import World
from lopa_dist.parallel.stop import Stop, Stopped
from tests.jobs import wandb_file
from tests.jobs.run.test_recall import QUESTIONS, config, texts

ONE = World("python")
ONE_RANK = SimpleNamespace(world=ONE)
MORE = [*QUESTIONS, "Ann has 4 books . Ann loses 2 books . How many books does Ann have now ?"]


def learning(tmp_path: Path, learn: int | str | None, questions: list[str] = QUESTIONS, **decode: Any) -> Config:
    found = config(tmp_path, questions, **{"drafts": 4, "draft_from": "auto"} | decode)
    return replace(found, job=JobConfig(learn=learn), learn=LearnConfig(minutes=0.03, rank=4))


def never(tmp_path: Path, questions: list[str] = QUESTIONS) -> Config:
    return replace(learning(tmp_path, None, questions), learn=LearnConfig())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("plain")
    run(config(folder, QUESTIONS, drafts=0, draft_from="auto"), folder / "run", ONE)
    return texts(folder / "run")


def test_texts_are_those_of_a_job_that_never_learns(
    tmp_path: Path, plain: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lessons, "gain", lambda *_: 2.0)
    report = run(learning(tmp_path, 5), tmp_path / "run", ONE)
    assert texts(tmp_path / "run") == plain
    [lesson] = report["lessons"]
    assert lesson["taken"]
    assert lesson["answers"] == 5
    assert lesson["steps"] > 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert "learned" in page

    # a job that goes on drafts as its earlier attempt has learned to, or as it never has
    loaded = []
    load = Learning.load
    monkeypatch.setattr(Learning, "load", lambda *args: loaded.append(load(*args)) or loaded[-1])
    assert run(learning(tmp_path, 5, MORE), tmp_path / "run", ONE)["lessons"] == [lesson]
    assert loaded == [True]
    assert texts(tmp_path / "run")[:-1] == plain
    run(never(tmp_path, MORE), tmp_path / "again", ONE)
    assert texts(tmp_path / "again") == texts(tmp_path / "run")


def test_lessons_are_shown_and_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """How far one has got, in the progress and in Weights & Biases, and what came of it."""
    monkeypatch.setattr(lessons, "gain", lambda *_: 2.0)
    asked = learning(tmp_path, 5)
    asked = replace(asked, logging=LoggingConfig(progress="auto", every_s=0.01, wandb=WandbConfig(mode="offline")))
    with caplog.at_level("INFO", "lopa_dist"):
        [lesson] = run(asked, tmp_path / "run", ONE)["lessons"]
    said = [line for line in caplog.messages if re.match(r"learning \d+%, loss \d", line)]
    assert said
    history = wandb_file.read(tmp_path / "run")["history"]
    steps = [row for row in history if "lesson/loss" in row]
    assert steps
    assert all(0 <= row["lesson/time"] < 1 for row in steps)  # not 1 where the last step is over
    # the lesson's time is not that of the steps before it, nor the moment between two of its entries
    [before] = [row["filled_per_s"] for row in history if "filled_per_s" in row and row["_step"] < steps[0]["_step"]][
        -1:
    ]
    assert before < 1e6
    [told] = [row for row in history if "lesson/gain" in row]
    assert told["lesson/accepted"] == lesson["accepted"]
    assert told["lesson/accepted_before"] == lesson["accepted_before"]
    numbers = [row["_step"] for row in history]
    assert numbers == sorted(set(numbers))  # none replaces another, and generation goes on behind them
    assert "step_ms/forward" in history[-1]


def test_what_does_not_pay_is_not_taken(tmp_path: Path, plain: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lessons, "gain", lambda *_: 1.0)
    report = run(learning(tmp_path, 5), tmp_path / "run", ONE)
    assert not report["lessons"][0]["taken"]
    assert not (tmp_path / "run" / "drafts").exists()
    assert texts(tmp_path / "run") == plain


@pytest.mark.parametrize("where", ["beginning", "step", "following", "numbers", "taking", "disk"])
def test_a_fault_costs_no_answer(
    tmp_path: Path, plain: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    def no_room(*_: Any, **__: Any) -> Any:
        if where == "disk":
            raise OSError(28, "No space left on device")
        raise torch.OutOfMemoryError("no room for this")

    monkeypatch.setattr(lessons, "gain", lambda *_: 2.0)
    nan = torch.tensor(float("nan"), requires_grad=True)
    place, name, what = {
        "beginning": (learning_of_a_job, "DraftsAdapter", no_room),
        "step": (Trainer, "loss", no_room),
        "following": (Trainer, "follow", no_room),
        "numbers": (Trainer, "loss", lambda *_: (nan * 1, torch.tensor(1.0))),
        "taking": (learning_of_a_job, "attaching", no_room),
        "disk": (Learning, "save", no_room),
    }[where]
    monkeypatch.setattr(place, name, what)
    report = run(learning(tmp_path, 5), tmp_path / "run", ONE)
    assert texts(tmp_path / "run") == plain
    problem = {"numbers": "not numbers", "disk": "No space left"}.get(where, "no room")
    [lesson] = report["lessons"]
    assert problem in lesson["problem"]
    assert lesson["problem"] in caplog.text
    assert lesson["taken"] == lesson["adopted"] == (where == "disk")
    assert (lesson["done"], lesson["answers"]) == (5, 5)
    assert (lesson["steps"] > 0) == (where in ("taking", "disk"))
    assert lessons_in(tmp_path / "run" / "journal") == report["lessons"]


@pytest.mark.parametrize("damage", ["truncated", "gone", "another mask"])
def test_a_job_without_what_an_earlier_attempt_learned_learns_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    monkeypatch.setattr(lessons, "gain", lambda *_: 2.0)
    monkeypatch.setattr(lessons, "AFRESH", 2)
    asked = learning(tmp_path, 5, QUESTIONS[:6])
    [first] = run(asked, tmp_path / "run", ONE)["lessons"]
    file = tmp_path / "run" / "drafts" / "adapter_model.safetensors"
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "gone":
        file.unlink()
    else:
        tensors = load_file(file)
        tensors = {name: x[:, 1:].contiguous() if "trainable_tokens" in name else x for name, x in tensors.items()}
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata()
        save_file(tensors, file, metadata)
        adapted = replace(asked.model, lora=str(file.parent), lora_rows="masks")
        with pytest.raises(CheckpointError, match="mask's embedding has shape"):
            EngineBuilder(adapted, torch.device("cpu")).load()
    with caplog.at_level("INFO"):
        again, second = run(learning(tmp_path, 5, MORE), tmp_path / "run", ONE)["lessons"]
    assert again == first
    assert second["taken"]
    assert "drafts are learned again: this attempt does not have those of an earlier one" in caplog.text
    assert ("what an earlier attempt has learned is not used" in caplog.text) == (damage != "gone")
    run(never(tmp_path, MORE), tmp_path / "never", ONE)
    assert texts(tmp_path / "run") == texts(tmp_path / "never")


def test_a_stop_keeps_what_pays_and_begins_no_further_request(
    tmp_path: Path, plain: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, stop = tmp_path / "run", Stop(60)
    monkeypatch.setattr(lessons, "gain", lambda *_: stop.ask("SIGTERM") or 2.0)
    with caplog.at_level("INFO"), pytest.raises(Stopped, match="SIGTERM"):
        run(learning(tmp_path, 5), folder, ONE, stop)
    assert "the job was told to stop; what it learned is kept for the next attempt" in caplog.text
    report = json.loads((folder / "report.json").read_text())
    [lesson] = report["lessons"]
    assert not lesson["taken"]
    assert lesson_sentence(lesson).endswith(". The job was told to stop; what it learned is kept for the next attempt.")
    assert "would not have paid" not in (folder / "report.html").read_text()
    assert report["requests"] == 5
    loaded = []
    load = Learning.load
    monkeypatch.setattr(Learning, "load", lambda *args: loaded.append(load(*args)) or loaded[-1])
    run(learning(tmp_path, 5), folder, ONE)
    assert loaded == [True]
    assert texts(folder) == plain


def test_a_lesson_that_a_stop_cut_short_goes_on_for_the_rest_of_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, stop = tmp_path / "run", Stop(60)
    monkeypatch.setattr(lessons, "gain", lambda *_: 2.0)
    monkeypatch.setattr(lessons, "AFRESH", 2)
    asked = replace(learning(tmp_path, 5), learn=LearnConfig(minutes=10, rank=4))
    with monkeypatch.context() as patch:
        patch.setattr(Lessons, "stepped", lambda *_: stop.ask("SIGTERM"))
        with pytest.raises(Stopped):
            run(asked, folder, ONE, stop)
    [first] = json.loads((folder / "report.json").read_text())["lessons"]
    seconds = []
    with monkeypatch.context() as patch:
        patch.setattr(Lessons, "hold", lambda *arguments: seconds.append(arguments[-1]))
        run(asked, folder, ONE)
    assert seconds == [600 - first["seconds"]]


@pytest.mark.parametrize(
    ("learn", "problem", "taken", "again"),
    [
        (5, "no room", False, True),
        ("auto", "", True, True),  # at four times as many answers
        ("auto", "", False, False),  # also if an earlier one was taken
        ("auto", lessons.KEPT, False, True),
        (5, "", True, False),
        (5, lessons.KEPT, False, False),
        (5, lessons.STOPPED, False, True),
    ],
)
def test_what_follows_an_earlier_attempt_s_whole_lesson(
    tmp_path: Path, learn: int | str, problem: str, taken: bool, again: bool
) -> None:
    earlier = {"steps": 9, "seconds": 1.8, "done": 300, "problem": problem, "taken": taken}
    if problem and problem != lessons.KEPT:  # a version before it was written recognised it by what it said
        earlier["cut_short"] = False
    asked = learning(tmp_path, learn)
    engine = SimpleNamespace(model=None)
    planned = Lessons(asked, ONE_RANK, engine, None, tmp_path, "", 9000, 300, 2, [earlier])  # type: ignore[arg-type]
    planned.adopted = True
    planned.plan()
    assert (not planned.ended, planned.spent_s) == (again, 0.0)


def test_a_stop_of_which_only_another_rank_has_heard_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It has ended the lesson, whose time was not over: this is not a lesson that was held."""
    monkeypatch.setattr(lessons, "gain", lambda *_: 1.0)
    monkeypatch.setattr(Group, "asked_anywhere", lambda _, when: when.startswith("slice"))
    with caplog.at_level("INFO"):
        [lesson] = run(learning(tmp_path, 5), tmp_path / "run", ONE)["lessons"]
    assert lesson["problem"] == "the job was told to stop before that paid"
    assert "would not pay" not in caplog.text


@pytest.mark.parametrize("source", ["auto", "masks"])
def test_later_attempts_know_of_earlier_lessons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, source: str
) -> None:
    """Of their outcomes, also in the report; a lesson that was held is not held again."""
    folder, stop = tmp_path / "run", Stop(60)
    monkeypatch.setattr(lessons, "gain", lambda *_: 1.0)
    monkeypatch.setattr(lessons, "AFRESH", 2)
    with monkeypatch.context() as patch:
        patch.setattr(Lessons, "stepped", lambda *_: stop.ask("SIGTERM"))
        with pytest.raises(Stopped):
            run(learning(tmp_path, 5, draft_from=source), folder, ONE, stop)
    [first] = json.loads((folder / "report.json").read_text())["lessons"]
    assert first["problem"] == "the job was told to stop before that paid"
    assert (first["attempt"], first["done"], first["answers"], first["taken"]) == (1, 5, 5, False)
    # it was stopped, so it is held again, with the answers of both attempts
    first, second = run(learning(tmp_path, 5, draft_from=source), folder, ONE)["lessons"]
    assert first["problem"]
    assert (second["attempt"], second["done"], second["answers"], second["problem"]) == (2, 7, 7, "")
    page = (folder / "report.html").read_text()
    assert "told to stop before that paid" in page
    assert "would not have paid" in page
    with caplog.at_level("INFO"):
        report = run(learning(tmp_path, 5, MORE, draft_from=source), folder, ONE)
    assert report["lessons"] == [first, second]
    assert "drafts are not learned again: an earlier attempt learned them after 7 answers" in caplog.text


@pytest.mark.parametrize("when", [0, 1])
def test_a_measurement_does_not_outlast_the_time_for_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: int
) -> None:
    """Neither the one before a lesson nor the one after it."""
    monkeypatch.setattr(lessons, "gain", lambda _, after, before, *__: 1.0 if after == before else 2.0)
    stop, batches = Stop(0), Trainer.batches

    def slow(trainer: Trainer, answers: Any, rng: Any) -> Any:
        if trainer.measurements == when and len(answers) < 5:  # those that are held out
            stop.ask("SIGTERM")
        return batches(trainer, answers, rng)

    monkeypatch.setattr(Trainer, "batches", slow)
    with pytest.raises(Stopped):
        run(learning(tmp_path, 8), tmp_path / "run", ONE, stop)
    [lesson] = json.loads((tmp_path / "run" / "report.json").read_text())["lessons"]
    assert lesson["problem"] == "the job was told to stop before that paid"
    assert (lesson["steps"] > 0) == (when == 1)
    assert lesson["acceptance"] == lesson["acceptance_before"]


@pytest.mark.parametrize(("when", "kept", "accepted"), [(2, True, 2), (3, False, 3)])
def test_a_later_slice_that_a_stop_breaks_off_does_not_hide_what_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: int, kept: bool, accepted: int
) -> None:
    """Broken off in its first measurement, the adapter is the one that is known to pay; in its last, nobody knows."""
    # there is time for a second slice, however long a step takes
    for key, value in {"FEWEST": 4, "LEAST_S": 0.0, "MOST_SHARE": 1e6}.items():
        monkeypatch.setattr(lessons, key, value)
    monkeypatch.setattr(lessons, "gain", lambda _, after, before, *__: 2.0 if before and after else 9.0)
    monkeypatch.setattr(lessons, "hoped_for", lambda _: None)
    stop, measure = Stop(0), Trainer.measure

    def measured(trainer: Trainer, answers: Any, leave: Any = None) -> Any:
        if trainer.measurements == when:
            stop.ask("SIGTERM")
        found = measure(trainer, answers, leave)
        return found and replace_counts(found, trainer.measurements)

    asked: list[str] = []
    ask = Group.asked_anywhere
    monkeypatch.setattr(Group, "asked_anywhere", lambda group, name: (asked.append(name), ask(group, name))[1])
    monkeypatch.setattr(Trainer, "measure", measured)
    given = replace(learning(tmp_path, "auto"), learn=LearnConfig(minutes=10, rank=4))
    with pytest.raises(Stopped):
        run(given, tmp_path / "run", ONE, stop)
    assert len(asked) == len({*asked}) > 0, "ranks would take an earlier slice's answer for this one's"
    [lesson] = json.loads((tmp_path / "run" / "report.json").read_text())["lessons"]
    assert lesson["problem"] == (lessons.KEPT if kept else lessons.STOPPED)
    assert lesson["accepted"] == accepted
    assert (tmp_path / "run" / "drafts").exists() == kept


@pytest.mark.parametrize(
    ("pays", "more", "stopped", "then"),
    [
        (True, True, False, lessons.MORE), (True, False, False, lessons.TAKE), (False, False, False, lessons.LEAVE),
        (False, True, False, lessons.MORE), (True, False, True, lessons.KEEP), (False, False, True, lessons.LEAVE),
    ],
)  # fmt: skip
def test_what_follows_a_slice(pays: bool, more: bool, stopped: bool, then: str) -> None:
    assert lessons.after_slice(pays, more, stopped) == then


def replace_counts(found: Reached, accepted: int) -> Reached:
    """A measurement in which so many drafts of a chain are accepted."""
    return Reached(np.full(4, 10.0), np.array([10.0 * accepted, 0, 0, 0]), 10.0)


def test_the_rank_that_failed_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 knows only that another one did."""
    group = SimpleNamespace(world=World("torchrun", 1, 2, 1, 2))
    engine = SimpleNamespace(model=None)
    of_rank_1 = Lessons(learning(tmp_path, 5), group, engine, None, tmp_path, "", 9, 0, 1)  # type: ignore[arg-type]
    for error in (LearningFailed("no room"), FailedElsewhere()):
        with of_rank_1.without_harm(Outcome(1)):
            raise error
    assert caplog.messages == ["WARNING: drafts could not be learned on rank 1 (no room)"]
    assert [outcome.problem for outcome in of_rank_1.outcomes] == ["no room", "another rank failed"]


def test_a_lesson_waits_for_an_answer_that_is_held_out(
    tmp_path: Path, plain: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lessons, "gain", lambda *_: 1.0)
    last_first = [*QUESTIONS[1:6], QUESTIONS[0], *QUESTIONS[6:]]
    with caplog.at_level("INFO"):
        [lesson] = run(learning(tmp_path, 3, last_first), tmp_path / "run", ONE)["lessons"]
    assert "drafts are not learned yet: of 3 answers, none is held out to measure with" in caplog.text
    assert (lesson["done"], lesson["answers"]) == (6, 6)


def test_a_lesson_after_more_answers_than_there_are_is_told(
    tmp_path: Path, plain: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        assert "lessons" not in run(learning(tmp_path, len(QUESTIONS)), tmp_path / "run", ONE)
    assert (
        f"drafts are not learned: job.learn={len(QUESTIONS)}, but there are only {len(QUESTIONS)} requests"
        in caplog.text
    )


def test_what_was_learned_before_stays_if_more_would_not_pay(
    tmp_path: Path, plain: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log, the report and the page do not say that the job goes on without."""
    for key, value in {"FEWEST": 4, "LEAST_S": 0.0, "AGAIN": 2, "MOST_SHARE": lessons.SLICE}.items():  # one slice each
        monkeypatch.setattr(lessons, key, value)
    gains = iter([2.0, 1.0])
    monkeypatch.setattr(lessons, "gain", lambda _, __, before, *___: 9.0 if before is None else next(gains))
    with caplog.at_level("INFO"):
        report = run(learning(tmp_path, "auto"), tmp_path / "run", ONE)
    first, second = report["lessons"]
    assert (first["taken"], first["adopted"]) == (True, True)
    assert (second["taken"], second["adopted"]) == (False, True)
    assert "that would not pay, so the job goes on with what it had learned before" in caplog.text
    assert "so the job went on with what it had learned before." in (tmp_path / "run" / "report.html").read_text()
    assert texts(tmp_path / "run") == plain


def test_auto_leaves_a_short_job_alone(tmp_path: Path, plain: list[str]) -> None:
    report = run(learning(tmp_path, "auto"), tmp_path / "run", ONE)
    assert "lessons" not in report
    assert texts(tmp_path / "run") == plain


@pytest.mark.parametrize(("hoped", "learns"), [(1.05, False), (1.1, True)])
def test_auto_does_not_begin_where_even_good_drafts_would_hardly_pay(
    tmp_path: Path,
    plain: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    hoped: float,
    learns: bool,
) -> None:
    for key, value in {"FEWEST": 4, "LEAST_S": 0.0}.items():
        monkeypatch.setattr(lessons, key, value)
    monkeypatch.setattr(lessons, "gain", lambda _, after, *__: hoped if after.shares == [lessons.WELL] else 1.0)
    with caplog.at_level("INFO"):
        report = run(learning(tmp_path, "auto"), tmp_path / "run", ONE)
    assert ("lessons" in report) == learns
    assert ("good ones would make the rest only 1.05 times as fast" in caplog.text) != learns
    assert texts(tmp_path / "run") == plain


def test_auto_goes_on_as_long_as_it_promises_to_pay(
    tmp_path: Path, plain: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in {"FEWEST": 4, "LEAST_S": 0.0, "SLICE": 0.3, "MOST_SHARE": 1e6}.items():
        monkeypatch.setattr(lessons, key, value)
    gains = iter([9.0, 1.2, 9.0, 1.5, 1.5])
    monkeypatch.setattr(lessons, "gain", lambda *_: next(gains))
    asked = replace(learning(tmp_path, "auto"), learn=LearnConfig(minutes=10, rank=4))
    report = run(asked, tmp_path / "run", ONE)
    [lesson] = report["lessons"]  # its first slice promised nine times the speed, its second no more
    assert lesson["gain"] == 1.5
    assert lesson["taken"]
    assert texts(tmp_path / "run") == plain


def test_an_adapter_that_learned_nothing_is_not_taken(tmp_path: Path, plain: list[str]) -> None:
    """The held-out answers alone decide, before against after: what the job accepts is measured in another way."""
    asked = replace(learning(tmp_path, 5), learn=LearnConfig(minutes=1e-5, rank=4))
    report = run(asked, tmp_path / "run", ONE)
    [lesson] = report["lessons"]
    assert lesson["gain"] < 1.02
    assert not lesson["taken"]
    assert texts(tmp_path / "run") == plain


def test_what_was_learned_with_another_rank_is_named(
    tmp_path: Path, plain: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lessons, "gain", lambda *_: 2.0)
    run(learning(tmp_path, 5), tmp_path / "run", ONE)
    again = replace(
        learning(tmp_path, 5), learn=LearnConfig(minutes=0.01, rank=8), job=JobConfig(learn=5, resume="new")
    )
    with caplog.at_level("INFO"):
        run(again, tmp_path / "run", ONE)
    assert "not used: " in caplog.text
    assert "has rank 4, and not learn.rank=8" in caplog.text
    assert texts(tmp_path / "run") == plain


def test_models_that_are_not_causal_do_not_learn(tmp_path: Path) -> None:
    asked = learning(tmp_path, 5)
    asked = replace(asked, model=replace(asked.model, path="embedded"), decode=DecodeConfig(context="d2f", drafts=8))
    with pytest.raises(ValueError, match=r"job\.learn=5: .* are not causal"):
        run(asked, tmp_path / "run", ONE)


def test_options_of_learning_without_effect_are_refused(tmp_path: Path) -> None:
    asked = learning(tmp_path, None)
    with pytest.raises(ValueError, match=r"learn\.minutes=0\.03: has no effect without job\.learn"):
        run(asked, tmp_path / "run", ONE)
    asked = learning(tmp_path, 5)
    with pytest.raises(ValueError, match=r"job\.learn=5: decode\.drafts=0 drafts nothing"):
        run(replace(asked, decode=replace(asked.decode, drafts=0)), tmp_path / "run", ONE)
    with pytest.raises(ValueError, match=r"job\.learn=5: masks learn, but decode\.draft_from=text drafts without them"):
        run(replace(asked, decode=replace(asked.decode, draft_from="text")), tmp_path / "run", ONE)


def test_an_adapter_of_drafts_is_no_setting_that_texts_depend_on(tmp_path: Path, plain: list[str]) -> None:
    folder = tmp_path / "run"
    run(never(tmp_path, QUESTIONS[:4]), folder, ONE)
    asked = never(tmp_path)
    builder = EngineBuilder(asked.model, torch.device("cpu"))
    Learning(builder.load(), builder.shape.mask_id, 4).save(tmp_path / "drafts", "causal", builder.revision)
    asked = replace(asked, model=replace(asked.model, lora=str(tmp_path / "drafts"), lora_rows="masks"))
    run(asked, folder, ONE)
    assert texts(folder) == plain
    assert [json.loads(line)["index"] for line in (folder / "results.jsonl").read_text().splitlines()] == [*range(12)]


def test_what_was_cut_short_and_not_kept_is_not_continued(tmp_path: Path) -> None:
    engine = SimpleNamespace(model=None)
    held = Lessons(learning(tmp_path, 5), ONE_RANK, engine, None, tmp_path, "", 9, 0, 1)  # type: ignore[arg-type]

    def no_room(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    held.learning = SimpleNamespace(save=no_room)  # type: ignore[assignment]
    outcome = Outcome(1, problem=lessons.KEPT, cut_short=True)
    held.save(outcome)
    assert "No space left" in outcome.problem
    assert not outcome.cut_short
