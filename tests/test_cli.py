"""Commands as users type them: what they print, and how they end."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lopa_dist import cli
from lopa_dist.checks import UserError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["decode.branchs=3"], "did you mean decode.branches"),
        (["decode.branches=three"], "decode.branches: Value 'three' of type 'str' could not be converted"),
        (
            ["model=dream_instruc"],
            r"^lopa-dist: model=dream_instruc: no such preset; did you mean dream_instruct\?",
        ),
        (["experiment=table5_gsm"], r"experiment=table5_gsm: no such preset; did you mean table5_gsm8k\?"),
        (["launcher=slrum"], r"launcher=slrum: no such preset; did you mean slurm\?"),
        (["decode.alpha=1"], r"decode\.alpha: no such key \(CHANGELOG\.md has those that are gone\)"),
        (["model=none_such"], r"^lopa-dist: model=none_such: no such preset\. There are a2d_qwen3_0_6b, "),
        (["trce", "r", "1"], "trce: no such command; did you mean trace"),
        (["doctor", "-m", "decode.drafts=2,3"], r"doctor is a command: it must be the first word, without -m"),
        (["decode=../model/embedded"], r"decode=\.\./model/embedded: a preset is named without its folder"),
        (["report", ""], r"argument FOLDER: it is empty; the current folder is \."),
        (["--task", "batch"], r"--task: no such flag; settings are KEY=VALUE"),
        (["task=batch", "task.input"], r"task\.input: settings are KEY=VALUE"),
        (["model=Qwen/Qwen3-8B"], r"model=Qwen/Qwen3-8B: not a preset; .* model\.path=Qwen/Qwen3-8B"),
        (["frobnicate"], r"no such command\. Commands: report, table, status"),
        (["report"], "usage"),
        (["report", "nowhere"], r"no report\.json"),
        (["task=batch", "--dry-run"], r"--dry-run is for launch/\*\.sh; `lopa-dist doctor KEY=VALUE \.\.\.` checks"),
        (["task.stop=x"], r"task\.stop: no such key; stop strings are a line's own"),
    ],
)
def test_command_line_mistakes_are_one_message(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr("sys.argv", ["lopa-dist", *arguments])
    with pytest.raises(SystemExit, match=message):
        cli.main()


def test_an_interrupted_job_says_how_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the settings and the folder: without the settings, the folder has results of other ones."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lopa_dist.jobs.run.job.run", interrupted)
    monkeypatch.setattr("sys.argv", ["lopa-dist", f"hydra.run.dir={tmp_path}", "task.limit=1"])
    with pytest.raises(SystemExit, match=r"^130$"):
        cli.main()
    assert (
        f"lopa-dist: interrupted; go on with the same command and hydra.run.dir={tmp_path}\n" in capsys.readouterr().err
    )


def test_a_reader_that_has_seen_enough_ends_a_command_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `lopa-dist models | head` does."""
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr("sys.argv", ["lopa-dist", "models"])
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr("sys.stdout", closed)
        with pytest.raises(SystemExit, match=r"^1$"):
            cli.main()
    assert capsys.readouterr().err == ""


def test_help_names_every_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["lopa-dist", "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        cli.main()
    shown = capsys.readouterr().out
    for command in cli.COMMANDS:
        assert f"lopa-dist {command} " in shown


@pytest.mark.parametrize("arguments", [["model.path=embeded"], ["explain", "model.path=embeded"]])
def test_a_near_miss_of_a_checkpoint_in_the_package_is_not_looked_for_on_the_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str]
) -> None:
    own = [] if "explain" in arguments else [f"hydra.run.dir={tmp_path}"]
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    monkeypatch.setattr("sys.argv", ["lopa-dist", *arguments, *own])
    with pytest.raises(SystemExit, match=r"^lopa-dist: model\.path=embeded: .*did you mean embedded\?$"):
        cli.main()


def test_hydra_adds_no_words_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.argv", ["lopa-dist", f"hydra.run.dir={tmp_path}", "task=batch", "task.input=nowhere"])
    with pytest.raises(SystemExit, match=r"^lopa-dist: task\.input=nowhere: no such file$"):
        cli.main()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("name", ["file/run", "file", "folder"])
def test_a_run_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder" / "cli.log").mkdir(parents=True)  # where the log should be
    monkeypatch.setattr("sys.argv", ["lopa-dist", f"hydra.run.dir={tmp_path / name}"])
    with pytest.raises(
        SystemExit, match=rf"the run folder cannot be written \(.*{name}.*\); give another hydra\.run\.dir"
    ):
        cli.main()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int) -> None:
    """As soon as the first request is finished: the journal is written, but the disk does not take it."""

    def fsync(descriptor: int) -> None:
        if "/journal/0" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr("lopa_dist.jobs.folder.journal.os.fsync", fsync)
    settings = ["task.limit=1", "logging.wandb.mode=disabled", "parallel.threads=1"]
    monkeypatch.setattr("sys.argv", ["lopa-dist", f"hydra.run.dir={tmp_path}", *settings])
    message = f"{os.strerror(number)} in {tmp_path}/journal: make room there, then start it again with hydra.run.dir="
    with pytest.raises(SystemExit, match=f"^lopa-dist: {message}{tmp_path}; finished requests are kept$"):
        cli.main()


def test_a_value_that_hydra_cannot_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["lopa-dist", "task=batch", "task.input=a b(1).jsonl"])
    with pytest.raises(
        SystemExit, match=r"^lopa-dist: task\.input=a b\(1\)\.jsonl: cannot be read; .*\"task\.input='a b"
    ):
        cli.main()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["report"],
            r"required: FOLDER; usage: lopa-dist report \[-h\] \[--baseline RUN\] \[--latex \| --markdown\] FOLDER \[",
        ),
        (["report", "a", "--all"], "unrecognized arguments: --all; usage: lopa-dist report"),
        (["trace", "run"], "required: ID; usage: lopa-dist trace"),
        (["trace", "run", "1", "--htm", "x"], "unrecognized arguments: --htm x; usage: lopa-dist trace"),
        (["trace", "run", "1", "--html"], "--html: expected one argument; usage: lopa-dist trace"),
    ],
)
def test_arguments_that_a_command_does_not_take(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr("sys.argv", ["lopa-dist", *arguments])
    with pytest.raises(SystemExit, match=message):
        cli.main()


@pytest.mark.parametrize("command", ["report", "merge", "trace", "explain", "doctor"])
def test_every_command_tells_its_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.setattr("sys.argv", ["lopa-dist", command, "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        cli.main()
    assert f"usage: lopa-dist {command} " in capsys.readouterr().out


def test_a_reader_that_has_seen_enough_gets_no_traceback() -> None:
    """As `| head` has."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, "-m", "lopa_dist", "--help"]
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=100, check=False)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("closed", ["2>&-", ">&-", ">&- 2>&-"])
def test_a_closed_stream_ends_no_command(closed: str) -> None:
    """As of cron jobs and daemons."""
    ran = subprocess.run(
        ["bash", "-c", f'"$0" -m lopa_dist explain decode.drafts {closed}', sys.executable],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0
    assert ("decode.drafts" in ran.stdout) == (closed == "2>&-")


@pytest.mark.parametrize("key", ["hydra.run.dir", "hydra.sweep.dir"])
def test_a_run_folder_elsewhere_is_refused(key: str) -> None:
    """Hydra would make a folder called s3: here."""
    with pytest.raises(UserError, match=rf"{re.escape(key)}=s3://b/c: a run folder is on a disk"):
        cli.checked([f"{key}=s3://b/c"])
