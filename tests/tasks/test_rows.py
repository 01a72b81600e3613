"""Where rows come from: files in every form, folders, datasets."""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
from datetime import date
from glob import glob
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lopa_dist.tasks.batch import Batch
from lopa_dist.tasks.rows import check, files_of, not_read, rows, takes

TWO = [{"prompt": "one\u2028line"}, {"prompt": "zwei"}]


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.jsonl.gz", "x.json.gz", "x"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_lines(tmp_path: Path, name: str, mark: bytes) -> None:
    content = mark + "\r\n".join(map(json.dumps, TWO)).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert [row.value for row in rows(str(tmp_path / name))] == TWO


NAMES = st.lists(st.sampled_from(["a", "b.jsonl", "ab.jsonl", ".b.jsonl"]), min_size=1, max_size=3)
PATTERNS = st.lists(st.sampled_from(["a", "*", "**", "?b.jsonl", "[ab]*.jsonl", "*.jsonl"]), min_size=1, max_size=3)


@given(pattern=PATTERNS, names=NAMES)
@settings(max_examples=60)
def test_what_a_pattern_would_take_is_what_glob_finds(pattern: list[str], names: list[str]) -> None:
    with TemporaryDirectory() as folder:
        file, source = Path(folder, *names), str(Path(folder, *pattern))
        taken = takes(source, str(file))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
        hidden = any(name.startswith(".") for name in names)  # which only a pattern that says so finds
        assert taken == (str(file) in glob(source, recursive=True)) or "*" not in source or hidden


@pytest.mark.parametrize("zipped", [False, True])
def test_standard_input_may_be_gzipped(monkeypatch: pytest.MonkeyPatch, zipped: bool) -> None:
    text = "".join(json.dumps(line) + "\n" for line in TWO).encode()
    given = io.BufferedReader(io.BytesIO(gzip.compress(text) if zipped else text))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(given))
    assert [row.value for row in rows("-")] == TWO


def test_closed_standard_input_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(ValueError, match=r"task\.input=-: standard input is closed; name a file"):
        list(rows("-"))


def test_a_file_that_is_damaged_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole = gzip.compress(b'{"prompt": "x"}\n' * 1000)
    (tmp_path / "a" / "x.jsonl.gz").write_bytes(whole)
    for broken in (whole[:-20], b"not compressed"):
        (tmp_path / "b" / "x.jsonl.gz").write_bytes(broken)
        with pytest.raises(ValueError, match=r"task\.input=\S+/b/x\.jsonl\.gz: cannot be read .*; mend or remove it"):
            list(rows(str(tmp_path)))


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
    for column, wanted in (("answer", "answer"), (None, "prompt or messages")):
        with pytest.raises(ValueError, match=f"no {wanted} in it; it has question, other: task.column=NAME says which"):
            list(Batch(source, column=column).items())
    datasets.Dataset.from_list(lines).to_parquet(tmp_path / "x.parquet")
    assert [row.value for row in rows(str(tmp_path / "x.parquet"))] == lines
    empty = datasets.Dataset.from_list(lines).select([])
    empty.to_parquet(tmp_path / "empty.parquet")
    assert list(rows(str(tmp_path / "empty.parquet"))) == []
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    numbers = {"single": pyarrow.array([0.1, None, 1e-8], "float32"), "half": pyarrow.array(np.float16([0.1, 2, 3]))}
    pyarrow.parquet.write_table(pyarrow.table(numbers), tmp_path / "numbers.parquet")
    assert [row.value for row in rows(str(tmp_path / "numbers.parquet"))] == [
        {"single": 0.1, "half": 0.1}, {"single": None, "half": 2}, {"single": 1e-8, "half": 3},
    ]  # fmt: skip
    (tmp_path / "no.parquet").write_text("no")
    with pytest.raises(ValueError, match=r"task\.input=.*no\.parquet: cannot be read \(Parquet file size"):
        list(rows(str(tmp_path / "no.parquet")))
    with pytest.raises(ValueError, match=r"task\.input=.*cannot be loaded"):
        list(rows(f"hf://{tmp_path}/set:validation"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nothing.jsonl", "no such file"),
        ("x.xlsx", r"task.input=x.xlsx: a .xlsx file is not read, but .jsonl, .json, .csv, .tsv and .parquet are"),
        ("x.txt.gz", "a .txt file is not read"),
        ("hf://name", "write hf://"),
        ("hf://a:b:c:d", "write hf://"),
        ("hf://:b", "write hf"),
    ],
)
def test_unusable_sources(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(source)


def test_answers_of_runs_below_a_folder_are_not_prompts(tmp_path: Path) -> None:
    """A job's run folder is `outputs/...` in the folder that the user is in, which may be that of the prompts."""
    run = tmp_path / "outputs" / "1"
    (run / "journal").mkdir(parents=True)
    for file in (tmp_path / "a.jsonl", run / "results.jsonl", run / "journal" / "0001-0.jsonl"):
        file.write_text('{"prompt": "x"}\n')
    assert len(files_of(str(tmp_path))) == 3
    (run / "report.json").write_text("{}")
    assert "report.json" in "".join(not_read(str(tmp_path)))
    (run / "job.lock").touch()
    assert not_read(str(tmp_path)) == []
    assert files_of(str(tmp_path)) == [tmp_path / "a.jsonl"]
    assert run / "results.jsonl" in files_of(str(run)), "unless the run is named"


def test_a_folder_has_what_its_links_lead_to(tmp_path: Path) -> None:
    """Once, also where a link leads back to the folder."""
    for name in ("in/own", "elsewhere/deep"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "x.jsonl").write_text(json.dumps({"prompt": name}) + "\n")
    (tmp_path / "in" / "linked").symlink_to("../elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to("../in")
    (tmp_path / "in" / "same").symlink_to("own")
    found = [row.value for row in rows(str(tmp_path / "in"))]
    assert found == [{"prompt": "elsewhere/deep"}, {"prompt": "in/own"}]


@pytest.mark.parametrize("name", ["x.json", "x.json.gz"])
def test_a_folder_of_objects_may_be_gzipped_or_have_marks(tmp_path: Path, name: str) -> None:
    content = b'\xef\xbb\xbf{"prompt": "x"}'
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert [(row.value, row.error) for row in rows(str(tmp_path))] == [({"prompt": "x"}, None)]


@pytest.mark.parametrize("nested", ["[" * 550 + "]" * 550, '{"a":' * 400 + "1" + "}" * 400])
def test_a_line_that_is_nested_too_deeply_is_an_error_of_its_own(tmp_path: Path, nested: str) -> None:
    wide = json.dumps({"id": "wide", "prompt": "x", "y": [[]] * 1000, "z": 0})
    deep = f'{{"id": "deep", "prompt": "x", "y": {nested}}}'
    (tmp_path / "x.jsonl").write_text("\n".join([wide, deep, wide.replace("0", "[" * 99 + "]" * 99)]))
    first, second, third = rows(str(tmp_path / "x.jsonl"))
    assert first.error is None
    assert third.error is None
    assert second.error == "y is nested more than 100 deep; make it flatter"
    assert second.value == {"id": "deep", "prompt": "x"}


def test_a_pipe_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """Its first lines, read to see what they are, would be missing."""
    os.mkfifo(tmp_path / "x.jsonl")
    with pytest.raises(ValueError, match=r"task\.input=.*: a pipe can be read only once.* with task\.input=-"):
        check(str(tmp_path / "x.jsonl"))
    check("-")


def test_broken_gzip_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(b"{}" * 9999)[:50])
    with pytest.raises(ValueError, match=r"task\.input=.*cannot be read"):
        list(rows(str(tmp_path / "x.jsonl.gz")))


def test_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"needs the datasets library: pip install 'lopa_dist\[eval\]'"):
        list(rows("hf://openai/gsm8k:main:test"))


def test_a_folder_without_prompts_is_no_input(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("{}")
    with pytest.raises(ValueError, match=r"task\.input=.*: a folder without files of prompts"):
        list(rows(str(tmp_path)))
    with pytest.raises(ValueError, match=r"task\.input=.*none-\*\.csv: no such file"):
        list(rows(str(tmp_path / "none-*.csv")))


@pytest.mark.parametrize("kind", [".parquet", ".csv", ".jsonl"])
def test_the_files_of_a_folder_and_of_a_pattern_are_read_one_after_the_other(tmp_path: Path, kind: str) -> None:
    """As Spark leaves them, with its marks and a description beside them."""
    for part in (1, 0):
        table = [{"prompt": f"{part} {i}", "temperature": "0.5"} for i in range(2)]
        file = tmp_path / f"part-{part}{kind}"
        if kind == ".parquet":
            pq, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
            pq.write_table(pa.Table.from_pylist(table), file)
        elif kind == ".csv":
            file.write_text("prompt,temperature\n" + "".join(f"{row['prompt']},0.5\n" for row in table))
        else:
            file.write_text("".join(json.dumps(row | {"temperature": 0.5}) + "\n" for row in table) + "broken\n")
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / ".part-0.crc").touch()
    (tmp_path / "dataset_info.json").write_text("{}")
    for source in (tmp_path, tmp_path / f"part-*{kind}"):
        items = list(Batch(str(source)).items())
        good = [item for item in items if not item.error]
        assert [item.prompt for item in good] == ["0 0", "0 1", "1 0", "1 1"]
        assert {item.sampling.temperature for item in good} == {0.5}
        if kind == ".jsonl":
            assert [item.custom_id for item in items] == [f"line-{i}" for i in range(1, 7)]
            assert "line 6 (part-1.jsonl, line 3): not JSON" in str(items[5].error)
    (tmp_path / "more.tsv").write_text("prompt\nx\n")
    with pytest.raises(ValueError, match=r"has files of several kinds .*\.tsv.*; name one: task\.input="):
        list(rows(str(tmp_path)))


TABLE = 'id{0}prompt\r\n007{0}"one, ""two""\n; three"\r\n\r\n8{0}\u00e9\r\n'


@pytest.mark.parametrize(("name", "separator"), [("x.csv", ","), ("x.csv", ";"), ("x.tsv", "\t"), ("x.CSV.gz", ",")])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_tables_of_texts(tmp_path: Path, name: str, separator: str, mark: bytes) -> None:
    content = mark + TABLE.format(separator).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert [(row.number, row.value) for row in rows(str(tmp_path / name))] == [
        (1, {"id": "007", "prompt": 'one, "two"\n; three'}),
        (2, {"id": "8", "prompt": "\u00e9"}),
    ]


def test_rows_of_a_table_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(b"id,prompt\n1,a,b\n2,\xff\n3,\n")
    first, second, third = rows(str(tmp_path / "x.csv"))
    assert str(first.error).startswith("it has 3 columns, and the first line names 2; quote texts")
    assert str(second.error) == "not UTF-8; save the table as UTF-8"
    assert third.value == {"id": "3", "prompt": None}
    (tmp_path / "y.csv").write_text('prompt\n"never closed\n')
    with pytest.raises(ValueError, match=r"y\.csv, line 2: cannot be read \(a quote is not closed\)"):
        list(rows(str(tmp_path / "y.csv")))
    for name in ("z.csv", "z.jsonl"):
        for encoding in ("utf-16", "utf-16-be"):
            mark = "" if encoding == "utf-16" else "\ufeff"
            (tmp_path / name).write_bytes(f"{mark}prompt\nx\n".encode(encoding))
            with pytest.raises(ValueError, match=rf"{name}: looks like UTF-16; save it as UTF-8"):
                list(rows(str(tmp_path / name)))
    (tmp_path / "empty.csv").write_text("")
    assert list(rows(str(tmp_path / "empty.csv"))) == []


@pytest.mark.parametrize("before", ["\n", " \n\n", "sep=;\n\n"])
def test_empty_lines_before_the_names_of_columns(tmp_path: Path, before: str) -> None:
    (tmp_path / "x.csv").write_text(before + 'id;prompt\n1;a\n2;"b')
    read = rows(str(tmp_path / "x.csv"))
    assert next(read).value == {"id": "1", "prompt": "a"}
    place = before.count("\n") + 3
    with pytest.raises(ValueError, match=rf"x\.csv, line {place}: cannot be read \(a quote is not closed\)"):
        next(read)


def test_a_table_may_say_that_tabs_separate_it(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("sep=\t\nid\tprompt\n1\ta, b\n")
    assert [row.value for row in rows(str(tmp_path / "x.csv"))] == [{"id": "1", "prompt": "a, b"}]


def test_a_pattern_means_files(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "x.jsonl").write_text('{"prompt": "x"}\n')
    assert [row.value for row in rows(str(tmp_path / "*"))] == [{"prompt": "x"}]


@pytest.mark.parametrize("head", ["prompt,prompt", "prompt,note,note"])
def test_columns_of_one_name_are_refused(tmp_path: Path, head: str) -> None:
    file = tmp_path / "in.csv"
    file.write_text(f"{head}\n" + ",".join("a" for _ in head.split(",")) + "\n")
    with pytest.raises(ValueError, match=rf"two columns are called '{head.split(',')[-1]}'"):
        list(rows(str(file)))


def test_a_text_in_parquet_that_is_not_utf_8_is_its_row_s_error(tmp_path: Path) -> None:
    pq, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    bad = pa.Array.from_buffers(
        pa.string(), 3, [None, pa.array([0, 1, 5, 6], pa.int32()).buffers()[1], pa.py_buffer(b"a\xff\xfebcd")]
    )
    pq.write_table(pa.table({"prompt": pa.array(["x", "y", "z"]), "note": bad}), tmp_path / "x.parquet")
    found = list(rows(str(tmp_path / "x.parquet")))
    assert [row.value for row in found] == [
        {"prompt": "x", "note": "a"}, {"prompt": "y", "note": None}, {"prompt": "z", "note": "d"}
    ]  # fmt: skip
    assert [row.error for row in found] == [
        None, "not UTF-8 in 'note'; write the table with texts in UTF-8", None
    ]  # fmt: skip


def test_values_in_parquet_that_python_cannot_hold_are_their_rows_errors(tmp_path: Path) -> None:
    """Years above 9999 mark what has no end in some databases; the others of their batch are read as ever."""
    pq, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    until = pa.array([1, 10**7, 2], pa.date32())
    table = {"prompt": pa.array(["x", "y", "z"]), "until": until, "share": pa.array([0.1, 0.1, 0.1], pa.float32())}
    pq.write_table(pa.table(table), tmp_path / "x.parquet")
    found = list(rows(str(tmp_path / "x.parquet")))
    assert [row.value["until"] for row in found] == [date(1970, 1, 2), None, date(1970, 1, 3)]
    assert [row.value["share"] for row in found] == [0.1] * 3
    assert [bool(row.error) for row in found] == [False, True, False]
    assert str(found[1].error).startswith("'until' cannot be read (OverflowError")
    elsewhere = pa.array([1], pa.timestamp("ms", "Nowhere/Land"))
    pq.write_table(pa.table({"prompt": pa.array(["x"]), "at": elsewhere}), tmp_path / "y.parquet")
    [row] = rows(str(tmp_path / "y.parquet"))
    assert "'at' cannot be read" in str(row.error)


def test_two_columns_of_a_parquet_file_with_one_name_are_refused(tmp_path: Path) -> None:
    pq, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    table = pa.table([pa.array(["x"]), pa.array(["y"])], names=["prompt", "prompt"])
    pq.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=r"x\.parquet: two columns are called 'prompt'; give each a name of its own"):
        list(rows(str(tmp_path / "x.parquet")))
