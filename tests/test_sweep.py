"""The points of a sweep are checked before the first of them starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lopa_dist import cli
from lopa_dist.checks import UserError
from lopa_dist.cli import hint
from lopa_dist.sweep import check_points


def test_points_that_can_run_are_let_through(tmp_path: Path) -> None:
    folder = f"hydra.sweep.dir={tmp_path}"
    check_points(["-m", "launcher=local", folder, "decode.drafts=0,4", "decode=embedded,verified", "task.limit=1,2"])
    check_points(["-m", "decode.temperature=0.5", "seed=1,2"])
    check_points(["-m", "decode.drafts=0,4", "seed=1"])
    check_points(["-m", "hydra/sweeper=other", "decode.drafts=x,y"])


def test_jobs_that_share_a_machine_are_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    for launcher, told in (("submitit_local", True), ("basic", False)):
        check_points(["-m", f"hydra/launcher={launcher}", "decode.drafts=0,4"])
        assert ("2 jobs run at once and share this machine: compare no speeds" in capsys.readouterr().err) == told


def test_points_whose_answers_could_not_be_judged_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    (tmp_path / "in.jsonl").write_text('{"problem": "1 + 1?", "solution": "$\\\\boxed{2}$"}\n')
    with pytest.raises(UserError, match="task=math needs math-verify"):
        check_points(["-m", "task=math", f"task.input={tmp_path}/in.jsonl", "task.fewshot=0", "decode.drafts=0,4"])


def refusal(*arguments: str) -> list[str]:
    """The lines of the message by which a sweep is refused."""
    with pytest.raises(UserError) as refused:
        check_points(arguments)
    return str(refused.value).splitlines()


def test_points_that_cannot_are_named_with_the_reason() -> None:
    first, point, advice = refusal("--multirun", "task.limit=3", "decode.drafts=0,4", "decode.branches=0,3")
    assert first == "1 of 4 points cannot run, so none has started:"
    assert point.startswith("  decode.drafts=0 decode.branches=3: decode.branches=3 with decode.verify=agreement needs")
    assert "hydra.sweep.dir" in advice


def test_points_that_do_not_suit_the_model_are_named_before_any_starts() -> None:
    first, point, _ = refusal("-m", "model=lists", "decode.drafts=0,2", "decode.branches=0")
    assert first == "1 of 2 points cannot run, so none has started:"
    assert point.startswith("  decode.drafts=0: decode.tau_look=0.5: has no effect here")
    assert "choose another decode= (decode=vanilla, decode=embedded_plain and others)" in point
    check_points(["-m", "model.path=owner/name", "decode.drafts=0,2", "decode.branches=0"])  # it may be downloaded


@pytest.mark.parametrize(
    ("given", "said"), [("task.input=nothing.jsonl", "no such file"), ("task.input=x.xlsx", "a .xlsx file is not read")]
)
def test_what_is_wrong_with_all_is_said_once(given: str, said: str) -> None:
    with pytest.raises(UserError, match=f"^{given}: {said}"):
        check_points(["-m", "task=batch", given, "decode.drafts=3,4"])


def test_a_seed_that_changes_nothing_is_refused() -> None:
    """Equal runs would pass for a spread of 0."""
    said = "^seed changes nothing at decode.temperature=0: every seed writes the same texts; task.problem_seed=1,2 asks"
    with pytest.raises(UserError, match=said):
        check_points(["-m", "seed=0,1,2", "decode=embedded,verified"])
    with pytest.raises(UserError, match=r"2 of 4 points cannot run.*\n  decode.temperature=0 seed=0: seed changes"):
        check_points(["-m", "decode.temperature=0,0.5", "seed=0,1"])
    check_points(["-m", "task=batch", "task.input=examples/prompts.jsonl", "seed=0,1"])


def test_only_slurm_gets_the_hint_to_do_without_it() -> None:
    assert "launcher=local" in hint(["-m", "launcher=slurm"])
    assert hint(["-m", "hydra/launcher=submitit_local"]) == ""


@pytest.mark.parametrize(
    "values",
    [["task.input=d/x.jsonl,d_x.jsonl"], ["logging.wandb.mode=disabled,offline"]],
)
def test_points_that_would_share_a_folder_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d").mkdir()
    for name in ("d/x.jsonl", "d_x.jsonl"):
        (tmp_path / name).write_text('{"prompt": "x"}\n')
    given = ["task=batch", "task.input=d_x.jsonl"] if "logging" in values[0] else ["task=batch"]
    with pytest.raises(UserError, match=r"would have one folder, .*hydra\.sweep\.subdir="):
        check_points([*given, *values])
    check_points([*given, *values, "hydra.sweep.subdir=${hydra.job.num}"])


def test_standard_input_is_for_one_point() -> None:
    with pytest.raises(UserError, match=r"task\.input=-: only one point can read standard input"):
        check_points(["task=batch", "task.input=-", "decode.block_size=8,16"])


def test_a_sweep_has_no_run_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["lopa-dist", "-m", "decode.block_size=8,16", "hydra.run.dir=x"])
    with pytest.raises(SystemExit, match=r"hydra\.run\.dir=x: is for a single job; hydra\.sweep\.dir="):
        cli.main()
