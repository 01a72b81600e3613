"""Lessons are kept for later attempts."""

from __future__ import annotations

from pathlib import Path

from lopa_dist.jobs.folder.lessons_file import NAME, add_lessons, lessons_in


def test_a_line_that_a_kill_cut_short_costs_no_other(tmp_path: Path) -> None:
    add_lessons(tmp_path, [{"steps": 1}])
    with (tmp_path / NAME).open("ab") as file:
        file.write(b'{"steps": 2, "pro\xffblem"')
    add_lessons(tmp_path, [{"steps": 3}])
    assert lessons_in(tmp_path) == [{"steps": 1}, {"steps": 3}]


def test_lessons_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert lessons_in(tmp_path) == []
    for lesson in ({"steps": 1}, {"steps": 2}):
        add_lessons(tmp_path, [lesson])
    with (tmp_path / NAME).open("a") as file:
        file.write('[]\n{"steps": ')  # a kill cut it short
    assert lessons_in(tmp_path) == [{"steps": 1}, {"steps": 2}]
    add_lessons(tmp_path, [{"steps": 3}])
    assert lessons_in(tmp_path) == [{"steps": 1}, {"steps": 2}, {"steps": 3}]
