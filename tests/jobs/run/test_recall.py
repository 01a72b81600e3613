"""Drafts from text in a job: where they came from is told, and a job that goes on drafts from its earlier answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lopa_dist.config import Config, LoggingConfig, ModelOptions, ParallelConfig, TaskConfig, WandbConfig
from lopa_dist.decode import DecodeConfig
from lopa_dist.jobs.folder.journal import Journal
from lopa_dist.jobs.folder.packed import RequestIds
from lopa_dist.jobs.run.job import run
from lopa_dist.jobs.run.recall import MOST_CHARACTERS, last_texts
from lopa_dist.parallel.launcher import World
from tests.jobs import wandb_file

QUESTIONS = [  # the first one is held out of lessons
    f"Sam has {number} books . Sam gives 3 away . How many books does Sam have now ?"
    for number in sorted(range(5, 17), key=lambda number: number != 12)
]


def config(folder: Path, questions: list[str], wandb: str = "disabled", **decode: Any) -> Config:
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in questions))
    return Config(
        model=ModelOptions(path="causal"),
        task=TaskConfig(name="batch", input=str(file)),
        decode=DecodeConfig(**{"context": "causal", "drafts": 8, "draft_from": "text", "max_new_tokens": 64} | decode),
        parallel=ParallelConfig(threads=1),
        logging=LoggingConfig(progress="never", every_s=0.01, wandb=WandbConfig(mode=wandb)),
    )


def texts(folder: Path) -> list[str]:
    return [json.loads(line)["text"] for line in (folder / "results.jsonl").read_text().splitlines()]


def test_a_job_that_goes_on_drafts_from_its_answers(tmp_path: Path) -> None:
    one = World("python")
    plain = tmp_path / "plain"
    run(config(tmp_path, QUESTIONS, drafts=0, draft_from="auto"), plain, one)

    first, second, fresh = (tmp_path / name for name in ("first", "second", "fresh"))
    run(config(tmp_path, QUESTIONS[:8]), first, one)
    before = sum(json.loads(line)["usage"]["forwards"] for line in (first / "results.jsonl").read_text().splitlines())
    forwards = run(config(tmp_path, QUESTIONS), first, one)["forwards"] - before
    alone = run(config(tmp_path, QUESTIONS[8:]), fresh, one)
    assert forwards < alone["forwards"]
    assert texts(first) == texts(plain)
    # where drafts come from is no setting that a text depends on: a job may go on with another
    run(config(tmp_path, QUESTIONS[:8]), second, one)
    run(config(tmp_path, QUESTIONS, draft_from="masks"), second, one)
    assert texts(second) == texts(plain)


def test_a_job_goes_on_with_other_lookahead_and_says_so(tmp_path: Path) -> None:
    """A journal of an earlier version, which also has these settings, goes on, too."""
    one, folder, plain = World("python"), tmp_path / "run", tmp_path / "plain"
    written = run(config(tmp_path, QUESTIONS, drafts=0, draft_from="auto"), plain, one)
    assert "warnings" not in written
    run(config(tmp_path, QUESTIONS[:4], drafts=0, draft_from="auto"), folder, one)
    file = folder / "journal" / "settings.json"
    settings = json.loads(file.read_text())
    settings["decode"] |= {"drafts": 0, "branches": 0}
    settings["model"]["revision"] = settings["model"]["revision"].partition("-")[0]
    file.write_text(json.dumps(settings))
    run(config(tmp_path, QUESTIONS[:8], branches=2), folder, one)
    report = run(config(tmp_path, QUESTIONS, drafts="auto"), folder, one)
    assert texts(folder) == texts(plain)
    (warning,) = report["warnings"]
    changes = "decode.branches: 0 and 2; decode.draft_from: auto and text; decode.drafts: 0 and 8 and auto"
    assert f"({changes})" in warning
    assert changes in (folder / "report.html").read_text()
    assert len(report["branch"]["wins"]) == 3
    idle = run(config(tmp_path, QUESTIONS, drafts=2), folder, one)  # an attempt that finds nothing to do
    assert (idle["tpf"], idle["warnings"]) == (report["tpf"], report["warnings"])
    with pytest.raises(ValueError, match=r"other settings: decode\.max_new_tokens was 64, is 32"):
        run(config(tmp_path, QUESTIONS, max_new_tokens=32), folder, one)


def test_sources_of_drafts_are_told(tmp_path: Path) -> None:
    report = run(config(tmp_path, QUESTIONS, "offline", draft_from="auto"), tmp_path / "run", World("python"))
    drafts = report["drafts"]
    verified = sum(one["verified"] for one in drafts["sources"].values())
    assert verified == sum(int(length) * count for length, count in drafts["chains"].items())
    accepted = sum(one["accepted"] for one in drafts["sources"].values())
    assert accepted / verified == drafts["accepted_share"]
    assert set(drafts["sources"]) == {"masks", "text", "own"}
    assert "Accepted by source" in (tmp_path / "run" / "report.html").read_text()
    history = wandb_file.read(tmp_path / "run")["history"]
    assert any("drafts/from_masks_per_forward" in entry for entry in history)


def test_the_last_answers_are_read_as_far_as_there_is_room(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    folder.mkdir()
    long = "x" * (MOST_CHARACTERS // 2)
    for attempt, written in ((1, ["a", long + "1", long]), (2, ["b", None]), (3, ["of this attempt"])):
        entries = [
            json.dumps({"id": text, "line": text and {"text": text, "finish_reason": "stop"}}) for text in written
        ]
        (folder / f"{attempt:03d}-0.jsonl").write_text("".join(f"{entry}\n" for entry in entries))
    ids = RequestIds()
    for name in ("a", "b"):
        ids.append(name)
    assert list(last_texts(Journal(tmp_path), 3, ids)) == [(1, "b", "stop"), (-1, long, "stop")]
