"""The first run on a GPU, without one: every stage runs as a toy, and what breaks costs nobody else's facts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import first_stages, gpu_first
from benchmarks.first_facts import brief, compared, perform
from benchmarks.first_stages import STAGES, agreement
from benchmarks.gpu_first import Journal, Stage, run
from lopa_dist.kernels import rows

CPU = torch.device("cpu")
BROKEN = "tests.broken_stages"


def facts(stage: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    perform(STAGES[stage], CPU)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["begun"] for line in lines[::2]] == [line["fact"] for line in lines[1::2]]
    return lines[1::2]


@pytest.mark.parametrize(("stage", "least"), [("environment", 3), ("kernels", 14), ("texts", 3)])
def test_a_toy_of_every_stage_finds_all_as_it_should_be(
    stage: str, least: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found = facts(stage, capsys)
    assert len(found) >= least
    assert all(fact["ok"] for fact in found), [fact for fact in found if not fact["ok"]]


def test_a_toy_measures_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    found = {fact["fact"]: fact for fact in facts("speed", capsys)}
    assert all(fact["ok"] for fact in found.values())
    steps = [fact for name, fact in found.items() if "sequence" in name]
    assert len(steps) == 3
    assert all(fact["steps"] > 0 and fact["ms a step"] is None for fact in steps)
    assert "aten::" in found["profile"]["table"]


def test_the_stages_fit_into_ten_minutes() -> None:
    assert [stage.name for stage in gpu_first.STAGES] == list(STAGES)
    assert sum(stage.seconds for stage in gpu_first.STAGES) < 600


def test_wrong_numbers_are_found_and_their_place_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(gate_up: torch.Tensor) -> torch.Tensor:
        made = rows.swiglu(gate_up)
        made[4:6, 9] += 3
        return made

    shape = first_stages.models(CPU)["Dream-7B"]
    assert first_stages.gate(CPU, shape, 24)["ok"]
    monkeypatch.setattr(first_stages, "swiglu", wrong)
    found = first_stages.gate(CPU, shape, 24)
    assert not found["ok"]
    assert found["worst"] in ([4, 9], [5, 9])
    assert (found["wrong rows"], found["wrong columns"]) == ("2: 4-5", "1: 9")


def test_answers_agree_by_position() -> None:
    assert agreement([[1, 2, 3], [4]], [[1, 2, 3], [4]]) == 1
    assert agreement([[1, 2, 3], [4]], [[1, 9, 3, 5], [4]]) == 3 / 5


def test_what_is_no_number_is_wrong() -> None:
    x = torch.ones(3, 4)
    spoilt = x.clone()
    spoilt[1, 2] = torch.nan
    assert compared(x, x, 1e-5)["ok"]
    found = compared(spoilt, x, 1e-5)
    assert not found["ok"]
    assert found["worst"] == [1, 2]
    assert brief([*range(0, 40, 2)]).endswith("18, and more")


def test_stages_that_break_leave_their_facts_and_the_others(tmp_path: Path) -> None:
    stages = [Stage("crash", 60, BROKEN), Stage("hang", 10, BROKEN), Stage("memory", 60, BROKEN)]
    run(stages, tmp_path, toy=True)
    lines = [json.loads(line) for line in (tmp_path / "first.jsonl").read_text().splitlines()]
    ends = [(line["stage"], line["ended"]) for line in lines if "ended" in line]
    died = ("crash", "died (SIGSEGV)")
    assert ends == [died, died, ("hang", "time limit"), ("memory", "fine")], "what dies is tried twice"
    found = [(line["stage"], line["fact"], line["ok"], line["blocking"]) for line in lines if "fact" in line]
    assert found == [
        ("crash", "before", True, False),
        ("crash", "before", True, True),
        ("hang", "before", True, False),
        ("memory", "too large", False, False),
        ("memory", "after", True, False),
    ]
    errors = (tmp_path / "errors.txt").read_text()
    for title, place in (
        ("## crash: died (SIGSEGV) in illegal access\n", "in illegal_access"),
        ("## crash: died (SIGSEGV) in illegal access, with blocking launches\n", "in illegal_access"),
        ("## hang: time limit in endless\n", "in endless"),
        ("## memory: too large\n", "broken_stages.py"),
    ):
        assert place in errors.split(title)[1].split("\n## ")[0], errors
    screen = (tmp_path / "first.md").read_text()
    assert "- crash: the process: died (SIGSEGV) in illegal access" in screen
    assert "- memory: fine, 2 facts, 1 wrong" in screen


@pytest.mark.parametrize("ok", [True, False])
def test_the_commands_status_says_what_was_found(ok: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ran(stages: list[Stage], folder: Path, toy: bool) -> Journal:
        assert [stage.name for stage in stages] == ["texts"]
        assert toy
        return Journal(folder, [{"stage": "texts", "fact": "bf16", "ok": ok}])

    monkeypatch.setattr(gpu_first, "run", ran)
    with pytest.raises(SystemExit) as left:
        gpu_first.main(["--out", str(tmp_path), "--toy", "--stage", "texts"])
    assert bool(left.value.code) is not ok
