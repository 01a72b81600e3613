"""`lopa-dist doctor`: a line for everything that a job needs, with the remedy of what is broken."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lopa_dist import cli
from lopa_dist.checks import UserError
from lopa_dist.jobs.commands.doctor.doctor import CHECKS
from tests.jobs.commands.doctor.machines import CPU_ONLY, shown


def test_the_shipped_model_would_run() -> None:
    would_run, screen = shown()
    assert would_run, screen
    for name in CHECKS:
        assert re.search(rf"^{re.escape(name)} +fine ", screen, re.MULTILINE), screen
    assert screen.endswith("A job would run here.\n")
    assert max(map(len, screen.splitlines())) <= 100


def test_what_is_broken_is_said_with_the_remedy_and_in_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "openai___openai_humaneval").mkdir()  # as if the data set were there
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["lopa-dist", "doctor", *CPU_ONLY, "task=humaneval"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 1
    screen = " ".join(capsys.readouterr().out.split())
    assert "sandbox broken task=humaneval runs the model's programs: task.allow_code_execution=true" in screen
    assert "A job would not run here: 1 thing is broken." in screen


def test_a_file_that_the_settings_name_must_be_there(tmp_path: Path) -> None:
    batch = ["task=batch", "task.input=prompts.jsonl"]
    would_run, screen = shown(*batch)
    assert not would_run
    assert re.search(r"^files +broken +task\.input=prompts\.jsonl: no such file$", screen, re.MULTILINE), screen
    (tmp_path / "prompts.jsonl").touch()
    would_run, screen = shown(*batch)
    assert would_run, screen
    assert "task.input=prompts.jsonl is there" in screen
    for output in ("/dev/null/x.csv", "/proc/nope/x.csv"):
        screen = " ".join(shown(*batch, f"task.output={output}")[1].split())
        assert f"task.output={output}: its folder cannot be written to (" in screen
    Path("t.csv").write_text("text\nHello\n")
    would_run, screen = shown("task=batch", "task.input=t.csv", "task.prompt={txt}")
    assert not would_run
    assert "task.prompt asks for {txt}" in " ".join(screen.split())


def test_words_that_are_no_settings_are_refused() -> None:
    with pytest.raises(UserError, match="doctor takes settings as key=value"):
        shown("dream")
    with pytest.raises(UserError, match=r"decode\.tau_conf"):
        shown("decode.tau_con=1")
