"""Where rows come from: files in every form, folders, datasets."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

from lopa_dist.tasks.batch import Batch
from lopa_dist.tasks.rows import check, rows

TWO = [{"prompt": "one\u2028line"}, {"prompt": "zwei"}]


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.jsonl.gz", "x.json.gz", "x.txt"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_lines(tmp_path: Path, name: str, mark: bytes) -> None:
    content = mark + "\r\n".join(map(json.dumps, TWO)).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert [row.value for row in rows(str(tmp_path / name))] == TWO


@pytest.mark.parametrize("name", ["x.json", "x.json.gz"])
def test_array(tmp_path: Path, name: str) -> None:
    content = json.dumps(TWO, ensure_ascii=False, indent=1).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert [row.value for row in rows(str(tmp_path / name))] == TWO


def test_datasets_and_parquet(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="needs datasets: pip install 'lopa_dist[eval]'")
    (tmp_path / "set").mkdir()
    lines = [{"question": "a", "other": 1}, {"question": "b", "other": 2}]
    (tmp_path / "set" / "test.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = f"hf://{tmp_path}/set:test"
    assert [row.value for row in rows(source)] == lines
    items = list(Batch(source, column="question").items())
    assert [(item.custom_id, item.prompt) for item in items] == [("line-1", "a"), ("line-2", "b")]
    assert "no column 'answer'; this row has question, other" in str(
        next(iter(Batch(source, column="answer").items())).error
    )
    assert "prompt or messages" in str(next(iter(Batch(source).items())).error)
    datasets.Dataset.from_list(lines).to_parquet(tmp_path / "x.parquet")
    assert [row.value for row in rows(str(tmp_path / "x.parquet"))] == lines
    empty = datasets.Dataset.from_list(lines).select([])
    empty.to_parquet(tmp_path / "empty.parquet")
    assert list(rows(str(tmp_path / "empty.parquet"))) == []
    (tmp_path / "no.parquet").write_text("no")
    with pytest.raises(ValueError, match=r"task\.input=.*no\.parquet: cannot be read \(Parquet file size"):
        list(rows(str(tmp_path / "no.parquet")))
    with pytest.raises(ValueError, match=r"task\.input=.*cannot be loaded"):
        list(rows(f"hf://{tmp_path}/set:validation"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nothing.jsonl", "no such file"),
        ("hf://name", "write hf://"),
        ("hf://a:b:c:d", "write hf://"),
        ("hf://:b", "write hf"),
    ],
)
def test_unusable_sources(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(source)


def test_broken_gzip_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(b"{}" * 9999)[:50])
    with pytest.raises(ValueError, match=r"task\.input=.*cannot be read"):
        list(rows(str(tmp_path / "x.jsonl.gz")))


def test_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"needs the datasets library: pip install 'lopa_dist\[eval\]'"):
        list(rows("hf://openai/gsm8k:main:test"))


def test_a_folder_without_json_files_is_no_input(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("{}")
    with pytest.raises(ValueError, match=r"task\.input=.*: a folder without \*\.json files"):
        list(rows(str(tmp_path)))
