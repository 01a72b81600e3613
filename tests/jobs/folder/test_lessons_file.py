"""Lessons are kept for later attempts."""

from __future__ import annotations

from pathlib import Path

from lopa_dist.jobs.folder.lessons_file import NAME, add_lessons, lessons_in


def test_lessons_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert lessons_in(tmp_path) == []
    for lesson in ({"steps": 1}, {"steps": 2}):
        add_lessons(tmp_path, [lesson])
    with (tmp_path / NAME).open("a") as file:
        file.write('[]\n{"steps": ')  # a kill cut it short
    assert lessons_in(tmp_path) == [{"steps": 1}, {"steps": 2}]
