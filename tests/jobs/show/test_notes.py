"""What a reader must know of some runs stands below their table."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lopa_dist.jobs.show.compare import compare
from lopa_dist.jobs.show.comparison import Comparison
from lopa_dist.jobs.show.seed_groups import grouped, load_reports
from tests.jobs.show.sweeps import make, table_of
from tests.pages import Page


def test_notes_of_the_same_kind_are_one(tmp_path: Path, report: dict[str, Any]) -> None:
    for drafts in (0, 2, 4):
        busy = f"other programs kept 1.{drafts} of 2 cores busy while this job generated"
        make(tmp_path, f"decode.drafts={drafts}", report | {"warnings": [busy]}, "++--", drafts=drafts)
    shown, _ = table_of(tmp_path)
    assert shown.count("other programs kept") == 1
    assert "All runs: other programs kept 1." in shown


def test_a_report_of_an_older_version_is_not_said_to_have_another_input_or_judge(
    tmp_path: Path, report: dict[str, Any]
) -> None:
    """It lacks hashes that later ones have."""
    new = report | {"whole_input": "a", "whole_prompts": "b", "own_code": {"the source of task.score": "a"}}
    old = {key: value for key, value in new.items() if key not in ("whole_prompts", "own_code")}
    old["decode"] = {key: value for key, value in new["decode"].items() if key != "rule"}
    for name, one in (("new", new), ("old", old)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_text(json.dumps(one))
    console = Console(record=True, width=200)
    compare(tmp_path, console)
    told = console.export_text()
    assert "Not all runs" not in told
    assert "rule" not in told


def test_a_machine_that_was_busy_is_told(tmp_path: Path, report: dict[str, Any]) -> None:
    busy = report["made"] | {"load": 9.5, "device": "some CPU, 2 cores"}
    make(tmp_path, "calm", report | {"made": busy | {"load": 2.0}}, "+++")
    make(tmp_path, "busy", report | {"made": busy}, "+++", drafts=4)
    make(tmp_path, "measured", report | {"made": busy | {"load": 7.0, "others": 0.1}}, "+++", drafts=8)
    console = Console(record=True, width=200)
    compare(tmp_path, console)
    said = console.export_text()
    assert re.search(r"so their times are not reliable: \d \(load 9\.5, 2 cores\)\.", said)
    assert "load 7" not in said, "that run has measured it"
    assert "load 2" not in said
    assert "same device" not in said


def test_other_devices_are_told(tmp_path: Path, report: dict[str, Any]) -> None:
    """Also those of single seeds of a row."""
    fast = {"made": report["made"] | {"device": "fast CPU, 64 cores", "host": "node7"}}
    for name, more, drafts in (("a,seed=1", {}, 0), ("a,seed=2", fast, 0), ("b,seed=1", fast, 4), ("c,seed=1", {}, 8)):
        make(tmp_path, name, report | more, "+++", drafts=drafts)
    console = Console(record=True, width=400)
    compare(tmp_path, console)
    own = report["made"]["device"]
    devices = f"run 1: {own}, fast CPU, 64 cores; run 2: fast CPU, 64 cores; run 3: {own}"
    assert f"so their times are not comparable ({devices})." in console.export_text()


@pytest.mark.parametrize(("fills", "told"), [(("a.py:f", "b.py:f"), False), (("a.py:f", "a.py:g"), True)])
def test_code_that_changed_is_the_same_file_s(
    tmp_path: Path, report: dict[str, Any], fills: tuple[str, str], told: bool
) -> None:
    for name, fill in zip(("one", "two"), fills, strict=True):
        make(tmp_path, name, report | {"own_code": {"the source of decode.fill": name}}, "+++", fill=fill)
    console = Console(record=True, width=200)
    compare(tmp_path, console)
    assert ("the source of decode.fill changed" in console.export_text()) == told


def test_settings_are_told_of_all_runs_or_below_the_table(tmp_path: Path, report: dict[str, Any]) -> None:
    """Where one name has no room for them, none has them: a row without would seem to have the usual ones."""
    for name, words in (("one", ["decode.drafts=0"]), ("two", [f"decode.drafts={'1' * 60}"]), ("three", [])):
        make(tmp_path, name, report, "+++", tau_conf=len(name) / 10)
        (tmp_path / name / ".hydra").mkdir()
        (tmp_path / name / ".hydra" / "overrides.yaml").write_text(json.dumps(words))
    console = Console(record=True, width=400)
    compare(tmp_path, console)
    said = console.export_text()
    assert "drafts=" not in said.partition("Settings")[0]
    assert re.search(rf"Settings in which the runs differ: run 1: .*drafts={'1' * 60}", said)
    assert re.search(r"run \d: drafts=0[;.]", said)
    assert re.search(r"run \d: as configured[;.]", said)


def test_samples_are_told_from_prompts_and_what_auto_does_is_said(tmp_path: Path, report: dict[str, Any]) -> None:
    (tmp_path / "pareto-old.pdf").touch()
    several = report | {"task": report["task"] | {"samples": 2}}
    for drafts in (2, "auto"):
        make(tmp_path, f"decode.drafts={drafts}", several, "++--", drafts=drafts)
        file = tmp_path / f"decode.drafts={drafts}" / "results.jsonl"
        file.write_text(re.sub(r'"custom_id": "(\d)"', r'"custom_id": "a#\1"', file.read_text()))
    console = Console(width=200, record=True)
    compare(tmp_path, console, baseline="drafts=2")
    shown = " ".join(console.export_text().split())
    assert "4 requests (2 prompts) each" in shown
    assert "With decode.drafts=auto (run 2), tokens per forward" in shown
    assert "Left from an earlier report of this folder: pareto-old.pdf" in shown
    [part] = [Comparison(tmp_path, grouped(tmp_path, load_reports(tmp_path)), "drafts=2", [])]
    assert "p is that of the sign test of the problems' means over samples." in part.methods()
    assert any("(run drafts=auto)" in note for note in part.named_notes), "a paper's table has no numbers"


def test_equal_runs_are_no_spread(tmp_path: Path, report: dict[str, Any]) -> None:
    for seed in (0, 1, 2):
        make(tmp_path, f"seed={seed}", report, "++--")
    make(tmp_path, "other", report, "+---", drafts=3)
    console = Console(width=140, record=True)
    compare(tmp_path, console)
    assert "3, equal at temperature 0" in console.export_text()
    assert "accuracy_sd" not in (tmp_path / "comparison.csv").read_text()


def test_what_a_reader_must_know_of_some_runs_stands_below_the_table(tmp_path: Path, report: dict[str, Any]) -> None:
    """Failed requests, pairs, warnings, speeds that differ, and what the figures of several seeds are."""
    fast, slow = ({"completion_tokens": 100, "decode_s": s, "tokens_per_s": {"job": 100 / s}} for s in (1.0, 3.0))
    make(tmp_path, "decode.drafts=0", report, "++--", drafts=0)
    make(tmp_path, "decode.drafts=16", report | {"warnings": ["no chat template"]}, "+++", drafts=16)
    file = tmp_path / "decode.drafts=16" / "report.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"requests": 4, "errors": 1, "expected": 9, "cut": 2}))
    for seed, speed in ((1, fast), (2, slow)):
        make(tmp_path, f"decode.drafts=2,seed={seed}", report | speed, "++--", drafts=2)
    console = Console(width=200, record=True)
    compare(tmp_path, console, baseline="drafts=0")
    shown = console.export_text()
    page = Page(tmp_path / "comparison.html").text
    with (tmp_path / "comparison.csv").open(newline="") as table:
        rows = {row["drafts"]: (number, row) for number, row in enumerate(csv.DictReader(table), 1)}
    failed, several = rows["16"][0], rows["2"][0]
    assert "4 (3 judged)" in shown
    assert float(rows["2"][1]["tokens_per_s"]) == 200 / 4, "all tokens by all seconds"
    for note in (
        f"Answers that are cut at their limit of tokens: run {failed}: 66.7%.",
        f"The accuracy of run {failed} leaves out 1 of its 4 requests (1 ended with an error).",
        f"Differences are over the problems that both have judged (run {min(failed, several)}",
        f"Tokens per second differ between runs of one row, probably because of other work: run {several} (33 to 100).",
        f"Run {failed}: no chat template.",
        f"Run {failed} was stopped: 4 of 9 requests are done.",
        ", and an interval as wide as one seed's. p is that of the sign test",
    ):
        assert note in " ".join(shown.split())
        assert note in " ".join(page.split())
    assert "They have judged different numbers of answers" in page
