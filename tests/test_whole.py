"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from lopa_dist.whole import named, whole


def test_takes_the_place_of_what_was_there(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text("old")
    with whole(file) as partial:
        partial.write_text("new")
        assert file.read_text() == "old"
    assert file.read_text() == "new"
    assert list(tmp_path.iterdir()) == [file]


def test_where_writing_fails_all_remains_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text("old")

    def write() -> None:
        with whole(file) as partial:
            partial.write_text("ne")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_what_a_kill_left_is_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    (tmp_path / "a.json.partial").write_text("torn by a kill")
    with whole(file) as partial:
        partial.write_text("new")
    assert file.read_text() == "new"


def test_two_writers_at_once(tmp_path: Path) -> None:
    """The last to finish wins, and what is there is one of both."""
    file = tmp_path / "a.json"
    with whole(file, ".1") as one:
        one.write_text("on")
        with whole(file, ".2") as two:
            two.write_text("two")
        assert file.read_text() == "two"
        one.write_text("one")
    assert file.read_text() == "one"


def test_errors_of_writing_name_the_file(tmp_path: Path) -> None:
    def write() -> None:
        with whole(tmp_path / "a.json") as partial, partial.open("w"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match=r"No space left on device: '.*/a\.json'"):
        write()

    def read() -> None:
        with named(tmp_path / "a.json"):
            (tmp_path / "b.json").read_text()

    with pytest.raises(FileNotFoundError, match=r"b\.json"):
        read()
