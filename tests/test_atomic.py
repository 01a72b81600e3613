"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from lopa_dist.atomic import atomic, naming


def test_takes_the_place_of_what_was_there(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text("old")
    with atomic(file) as partial:
        partial.write_text("new")
        assert file.read_text() == "old"
    assert file.read_text() == "new"
    assert list(tmp_path.iterdir()) == [file]


def test_where_writing_fails_all_remains_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text("old")

    def write() -> None:
        with atomic(file) as partial:
            partial.write_text("ne")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_what_a_kill_left_is_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    (tmp_path / "a.json.partial").write_text("torn by a kill")
    with atomic(file) as partial:
        partial.write_text("new")
    assert file.read_text() == "new"


def test_errors_of_writing_name_the_file(tmp_path: Path) -> None:
    def write() -> None:
        with atomic(tmp_path / "a.json") as partial, partial.open("w"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match=r"No space left on device: '.*/a\.json'"):
        write()

    def read() -> None:
        with naming(tmp_path / "a.json"):
            (tmp_path / "b.json").read_text()

    with pytest.raises(FileNotFoundError, match=r"b\.json"):
        read()
