"""Many files are read side by side while few of them are open."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path

import pytest

from lopa_dist.jobs.folder import open_files
from lopa_dist.jobs.folder.journal import Journal
from lopa_dist.jobs.folder.merged import merge
from lopa_dist.jobs.folder.open_files import lines_of, mapped_files
from lopa_dist.jobs.folder.packed import RequestIds

resource = pytest.importorskip("resource")


@contextmanager
def few_files(more: int) -> Iterator[None]:
    """This process may open `more` files than it has open."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + more, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.fixture
def part_files(tmp_path: Path) -> list[Path]:
    files = [tmp_path / f"{number}" for number in range(300)]
    for number, file in enumerate(files):
        file.write_text(f"{number} a\u2028\n{number} b\n")
    return files


def test_places_in_many_files(part_files: list[Path]) -> None:
    mapped = mapped_files()
    with few_files(open_files.OPEN + 20):
        for number in [*range(300), *reversed(range(300))]:
            second = len(f"{number} a\u2028\n".encode())
            assert mapped(part_files[number])[second : second + 3] == f"{number} b"[:3].encode()


def test_lines_of_many_files(part_files: list[Path]) -> None:
    with few_files(20):
        rows = list(zip_longest(*map(lines_of, part_files)))
    assert rows == [tuple(f"{n} a\u2028\n" for n in range(300)), tuple(f"{n} b\n" for n in range(300))]


def test_long_files_are_read_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_files, "READ_BYTES", 10)
    (tmp_path / "file").write_text("".join(f"line {n}\n" for n in range(20)) + "no end")
    assert "".join(lines_of(tmp_path / "file")) == (tmp_path / "file").read_text()


def test_a_journal_of_a_thousand_parts_is_merged(tmp_path: Path) -> None:
    """As of 1,024 replicas, or of 64 after 16 attempts: more than a process may have open."""
    journal, ids = Journal(tmp_path), RequestIds()
    journal.folder.mkdir()
    names = [f"{number:024x}" for number in range(1100)]
    for number, name in enumerate(names):
        ids.append(name)
        entry = {"id": name, "at": 0.0, "line": {"custom_id": name}}
        (journal.folder / f"001-{number}.jsonl").write_text(json.dumps(entry) + "\n")
    with few_files(open_files.OPEN + 20):
        merged = merge(journal, tmp_path, ids, lambda index: {}, range(len(names)))
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [(line["custom_id"], line["index"]) for line in lines] == [(name, n) for n, name in enumerate(names)]
    assert merged.failed == len(names)
