"""The log on the terminal: nobody need read it."""

from __future__ import annotations

import io
import logging
import os
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lopa_dist.jobs.console import ConsoleHandler, LogFile
from lopa_dist.setting_keys import CONF


def test_a_reader_that_has_gone_is_no_error(capfd: pytest.CaptureFixture[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w", buffering=1) as stream:
        handler = ConsoleHandler(stream)
        handler.handle(logging.makeLogRecord({"msg": "twice"}))
        handler.handle(logging.makeLogRecord({"msg": "twice"}))
        assert capfd.readouterr().err == ""
        handler.handle(logging.makeLogRecord({"msg": "%d", "args": ("no number",)}))
        assert "Logging error" in capfd.readouterr().err
        with pytest.raises(BrokenPipeError):
            stream.close()


def test_a_full_standard_error_prints_nothing_for_each_line(capfd: pytest.CaptureFixture[str]) -> None:
    with open("/dev/full", "w", buffering=1, encoding="utf-8") as stream:
        handler = ConsoleHandler(stream)
        handler.handle(logging.makeLogRecord({"msg": "twice"}))
        assert capfd.readouterr().err == ""
        handler.stream = None  # type: ignore[assignment] # else what is left in it is written when it is closed
        with pytest.raises(OSError, match="No space"):
            stream.close()


def test_texts_of_the_user_s_command_no_terminal(tmp_path: Path) -> None:
    """Names of columns, or errors of a judge, may hold what sets a terminal's title or clears it."""
    stream = io.StringIO()
    handlers = ConsoleHandler(stream), LogFile(tmp_path / "cli.log", encoding="utf-8")
    for handler in handlers:
        handler.handle(logging.makeLogRecord({"msg": "it has %s", "args": ("\x1b]0;title\x07",)}))
        handler.close()
    assert stream.getvalue() == (tmp_path / "cli.log").read_text() == "it has \\x1b]0;title\\x07\n"


def test_a_folder_s_name_that_is_no_utf_8_is_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As Python reads it from the file system, it has lone surrogates."""
    settings = OmegaConf.load(CONF / "config.yaml").hydra.job_logging.handlers.file
    given = {name: value for name, value in settings.items() if name != "class"}
    handler = LogFile(tmp_path / "cli.log", **given)
    handler.handle(logging.makeLogRecord({"msg": "in caf\udce9"}))
    handler.close()
    assert (tmp_path / "cli.log").read_text() == "in caf\\udce9\n"
    assert not capfd.readouterr().err


def test_a_full_disk_prints_nothing_for_each_line(capfd: pytest.CaptureFixture[str]) -> None:
    """The job says it in a line of its own."""
    handler = LogFile("/dev/full", encoding="utf-8")
    handler.handle(logging.makeLogRecord({"msg": "\u05d0"}))
    assert capfd.readouterr().err == ""
    handler.handle(logging.makeLogRecord({"msg": "%d", "args": ("no number",)}))
    assert "Logging error" in capfd.readouterr().err
    handler.stream = None  # type: ignore[assignment] # else what is left in it is written when it is closed
