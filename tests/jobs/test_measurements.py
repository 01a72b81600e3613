"""Measurements are kept whole: a job that reads while another writes finds the old one or the new one."""

from __future__ import annotations

from pathlib import Path

import pytest

from lopa_dist.jobs.measurements import cache_folder, keep, kept

SUBJECT = {"device": "one"}


def test_a_reader_never_finds_half_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOPA_CACHE", str(tmp_path))
    file = keep("times", SUBJECT, {"times": [1]})
    seen = []
    write = Path.write_text

    def slow(path: Path, text: str) -> None:
        write(path, text[: len(text) // 2])
        seen.append(kept("times", SUBJECT))
        write(path, text)

    monkeypatch.setattr(Path, "write_text", slow)
    assert keep("times", SUBJECT, {"times": [2]}) == file
    assert seen == [{"subject": SUBJECT, "times": [1]}]
    assert kept("times", SUBJECT) == {"subject": SUBJECT, "times": [2]}
    assert list(cache_folder().iterdir()) == [file]
