"""`lopa-dist learn RUN`: an adapter, figures and a page from a run's answers."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lopa_dist.checks import UserError
from lopa_dist.commands import perform
from lopa_dist.jobs.commands import learn as command
from lopa_dist.jobs.commands.trace import trace
from lopa_dist.jobs.run.job import run
from lopa_dist.learn.config import LearnConfig
from lopa_dist.learn.trainer import Trainer
from lopa_dist.models.adapter import load_adapter
from lopa_dist.parallel.launcher import World
from lopa_dist.parallel.stop import Stopped
from tests.jobs.folder.test_one_job import other
from tests.jobs.run.test_lessons import never
from tests.jobs.run.test_recall import QUESTIONS, texts

QUICK = ["learn.minutes=0.02", "learn.rank=4", "parallel.threads=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("learn")
    run(never(made), made / "run", World("python"))
    return made / "run"


def test_a_run_is_learned_from(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "DRAFTS", (2,))
    monkeypatch.setattr("lopa_dist.learn.learning.HELD_OUT", 3)
    perform("learn", [str(folder), *QUICK])
    said = capsys.readouterr().out
    assert "tokens per forward by drafts: 2: " in said
    assert "too few answers were held out to tell whether it pays" in said
    assert f"model.lora={folder}/drafts model.lora_rows=masks" in said
    drafts = folder / "drafts"
    learned: dict[str, Any] = json.loads((drafts / "learn.json").read_text())
    assert learned["answers"] == len(QUESTIONS)
    assert learned["steps"] > 0
    assert learned["tokens_a_forward"].keys() == {"0", "2"}
    page = (drafts / "learn.html").read_text()
    assert f"<b>{learned['held_out']['accepted']}</b>" in page
    first = (drafts / "adapter_model.safetensors").read_bytes()

    perform("learn", [str(folder), *QUICK])
    assert "continuing with the earlier drafts" in capsys.readouterr().out
    assert (drafts / "adapter_model.safetensors").read_bytes() != first

    with pytest.raises(ValueError, match=r"has rank \d+, and not learn\.rank=3: correct that, or move .*/drafts away"):
        perform("learn", [str(folder), *QUICK, "learn.rank=3"])

    asked = never(tmp_path)
    drafting = replace(asked, model=replace(asked.model, lora=str(drafts), lora_rows="masks"))
    run(drafting, tmp_path / "run", World("python"))
    assert texts(tmp_path / "run") == texts(folder)


def test_a_folder_that_cannot_be_written_is_noticed_before_learning(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "run", ignore=shutil.ignore_patterns("drafts"))
    (tmp_path / "run" / "drafts").write_text("a file")
    with pytest.raises(ValueError, match=r"drafts, for what is learned, cannot be written"):
        perform("learn", [str(tmp_path / "run"), *QUICK])


def test_what_a_stop_leaves_unmeasured_is_said_and_what_was_learned_is_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "drafts", ignore_errors=True)
    monkeypatch.setattr(command, "DRAFTS", (2,))
    monkeypatch.setattr(command.Group, "asked_anywhere", lambda _, when: when != "before")
    with pytest.raises(Stopped, match="what was learned until then is kept"):
        perform("learn", [str(tmp_path / "run"), *QUICK])
    assert "it was told to stop before it could measure" in capsys.readouterr().out
    drafts = tmp_path / "run" / "drafts"
    learned = json.loads((drafts / "learn.json").read_text())
    assert learned["tokens_a_forward"]["2"]["before"] > 0
    assert learned["tokens_a_forward"]["2"]["after"] is learned["break_even_answers"] is None
    assert "<b>not known</b>" in (drafts / "learn.html").read_text()
    load_adapter(drafts, "masks")


def test_two_do_not_learn_into_one_folder(folder: Path, tmp_path: Path) -> None:
    """One of them would lose what it had learned."""
    shutil.copytree(folder, tmp_path / "run", ignore=shutil.ignore_patterns("drafts"))
    lock = tmp_path / "run" / "drafts" / command.LOCK
    lock.parent.mkdir(exist_ok=True)
    with (
        other(lock.parent, lock.name),
        pytest.raises(UserError, match=r"another job is at work in it .* or copy the run"),
    ):
        perform("learn", [str(tmp_path / "run"), *QUICK])
    assert not (lock.parent / "learn.json").exists()


def test_a_lesson_that_fails_is_told_in_a_line(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(folder, tmp_path / "run")
    monkeypatch.setattr(command, "DRAFTS", (2,))

    def no_room(*_: object) -> None:
        raise torch.OutOfMemoryError("no room for this")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "loss", no_room)
        with pytest.raises(ValueError, match=r"no room for this; what was saved in .*drafts before stays"):
            perform("learn", [str(tmp_path / "run"), *QUICK])
    monkeypatch.setattr(command, "is_held_out", lambda prompt: True)
    with pytest.raises(ValueError, match=r"all \d+ answers are to prompts that are held out"):
        perform("learn", [str(tmp_path / "run"), *QUICK])


def test_an_array_s_shards_must_be_merged_first(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "array" / "shard-0")
    with pytest.raises(ValueError, match=r"`lopa-dist merge .*array` joins its shards; learn from that"):
        perform("learn", [str(tmp_path / "array")])


def test_a_run_with_branches_is_learned_from(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are those of chains alone, which drafts=0 has, too."""
    monkeypatch.setattr(command, "DRAFTS", (2,))
    shutil.copytree(folder, tmp_path / "run")
    file = tmp_path / "run" / "report.json"
    report = json.loads(file.read_text())
    report["decode"] |= {"branches": 2}
    file.write_text(json.dumps(report))
    perform("learn", [str(tmp_path / "run"), *QUICK])
    assert (tmp_path / "run" / "drafts" / "learn.json").exists()


def test_answers_of_other_weights_are_not_learned_from(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "run")
    file = tmp_path / "run" / "report.json"
    report = json.loads(file.read_text())
    file.write_text(json.dumps(report | {"weights": report["weights"] | {"revision": "0" * 16}}))
    with pytest.raises(ValueError, match=r"causal has changed .* \(revision 0{16}, now [\w-]+\); another model"):
        perform("learn", [str(tmp_path / "run"), *QUICK])


def test_a_run_with_a_merged_adapter_is_refused(folder: Path, tmp_path: Path) -> None:
    """A job takes one adapter: what was learned beside a merged one could not be used."""
    drafts, other = tmp_path / "lora", tmp_path / "run"
    shutil.copytree(folder, other)
    drafts.mkdir()
    (drafts / "adapter_config.json").write_text("{}")
    file = other / "report.json"
    report = json.loads(file.read_text())
    report["model"] |= {"lora": str(drafts), "lora_rows": "all"}
    file.write_text(json.dumps(report))
    with pytest.raises(ValueError, match="a job takes one adapter"):
        perform("learn", [str(other), *QUICK])


def test_a_relative_input_is_found_from_another_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the job was started."""
    shutil.copytree(folder, tmp_path / "run")
    file = tmp_path / "run" / "report.json"
    report = json.loads(file.read_text())
    begun = Path(report["task"]["input"]).parent
    file.write_text(json.dumps(report | {"task": report["task"] | {"input": Path(report["task"]["input"]).name}}))
    for record in (tmp_path / "run" / "journal").glob("0*.json"):
        record.write_text(json.dumps(json.loads(record.read_text()) | {"folder": str(begun)}))
    monkeypatch.chdir(tmp_path)
    assert command.settings_of(command.report_of(tmp_path / "run"), []).task.input == report["task"]["input"]
    assert trace(tmp_path / "run", "0").steps


def test_settings_that_a_preset_had_and_nothing_reads_are_no_mistake(folder: Path, tmp_path: Path) -> None:
    """A report has what its job resolved: of `decode=verified`, the preset of any checkpoint, one block at a time."""
    other = tmp_path / "run"
    other.mkdir()
    for file in folder.glob("*.json*"):
        (other / file.name).write_bytes(file.read_bytes())
    report = json.loads((other / "report.json").read_text())
    report["decode"] |= {"max_active_blocks": 1}
    (other / "report.json").write_text(json.dumps(report))
    perform("learn", [str(other), "learn.minutes=0.005", *QUICK[1:]])
    assert (other / "drafts" / "learn.json").exists()


def test_what_learn_does_not_take_is_named(folder: Path, tmp_path: Path) -> None:
    for arguments, message in (
        ([str(folder), "decode.drafts=8"], r"decode\.drafts=8: has no effect here"),
        ([str(folder), "learn.minute=8"], r"learn\.minute: no such key; did you mean learn\.minutes"),
        ([str(tmp_path)], r"no report\.json; name the folder of a finished or stopped run"),
        ([str(folder), "learn.minutes=0"], r"learn\.minutes=0"),
    ):
        with pytest.raises(ValueError, match=message):
            perform("learn", arguments)


def test_a_run_of_a_masked_model_has_nothing_to_learn(tmp_path: Path) -> None:
    asked = replace(never(tmp_path, QUESTIONS[:2]), learn=LearnConfig())
    asked = replace(
        asked,
        model=replace(asked.model, path="embedded"),
        decode=replace(asked.decode, context="d2f", draft_from="auto", verify="agreement", max_new_tokens=32),
    )
    run(asked, tmp_path / "run", World("python"))
    with pytest.raises(ValueError, match="not causal"):
        perform("learn", [str(tmp_path / "run"), *QUICK])
