"""`lopa-dist table`: what a run left, with plain columns, beside what its input said."""

from __future__ import annotations

import csv
import json
import logging
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from lopa_dist.checks import UserError
from lopa_dist.commands import perform
from lopa_dist.config import TaskConfig, check_files
from lopa_dist.jobs.commands.trace import trace
from lopa_dist.jobs.folder.apart import check_apart
from lopa_dist.jobs.run.job import run
from lopa_dist.jobs.run.output import warnings_of, write_output
from lopa_dist.jobs.show.run_page import questions_again
from lopa_dist.jobs.show.table import input_names, write_table
from lopa_dist.parallel.launcher import World
from tests.jobs.run.test_job import config

LINES = [
    {
        "id": 7,
        "prompt": "Sam has 12 candles . How many candles does Sam have ?",
        "n": 2,
        "expected": 12,
        "text": "t",
    },
    {"prompt": " "},
    {"custom_id": "z", "messages": [{"role": "user", "content": "Olga has 8 books ."}], "tags": ["a"]},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("run")
    (made / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    run(config(TaskConfig(name="batch", input=str(made / "in.jsonl"), limit=None)), made, World("python"))
    return made


def results(folder: Path, name: str = "results.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_results_carry_what_the_input_said_besides(folder: Path) -> None:
    found = results(folder)
    own = {"expected": 12, "text": "t"}
    assert [line.get("metadata") for line in found] == [own, own, None, {"tags": ["a"]}]
    assert [line.get("sample") for line in found] == [0, 1, None, None]
    assert results(folder, "errors.jsonl") == [found[2]]


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_a_row_a_result(folder: Path, tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"t{ending}"
    count, columns, missing = write_table(folder, file)
    if ending == ".csv":
        with file.open(newline="") as lines:
            rows = list(csv.DictReader(lines))
    else:
        parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow: pip install 'lopa_dist[eval]'")
        rows = [
            {key: "" if value is None else str(value) for key, value in row.items()}
            for row in parquet.read_table(file).to_pylist()
        ]
    assert (count, missing) == (4, "")
    assert all(list(row) == columns for row in rows)
    assert [(row["id"], row["sample"]) for row in rows] == [("7", "0"), ("7", "1"), ("line-2", ""), ("z", "")]
    assert [row["prompt"] for row in rows] == [LINES[0]["prompt"]] * 2 + [" ", "Olga has 8 books ."]
    lines = results(folder)
    assert [row["text"] for row in rows] == [line["text"] for line in lines]
    assert rows[0]["forwards"] == str(lines[0]["usage"]["forwards"])
    assert float(rows[0]["tokens_per_forward"]) == lines[0]["tpf"]
    assert (rows[0]["expected"], rows[0]["input.text"], rows[3]["tags"]) == ("12", "t", '["a"]')
    assert rows[2]["error"].startswith("line 2: prompt has nothing but white space")


def test_a_column_of_the_input_has_one_name_in_all_rows(folder: Path, tmp_path: Path) -> None:
    """Also in those of errors, which have no figures whose names it could take."""
    own = {"forwards": "mine", "latency_s": "mine, too", "note": "n"}
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": p, **own}) + "\n" for p in ("Sam has 3 .", " ")))
    run(config(TaskConfig("batch", input=str(tmp_path / "in.jsonl"))), tmp_path / "run", World("python"))
    write_table(tmp_path / "run", tmp_path / "t.csv")
    with (tmp_path / "t.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [(row["input.forwards"], row["input.latency_s"], row["note"]) for row in rows] == [tuple(own.values())] * 2
    assert rows[0]["forwards"].isdigit()
    assert (rows[1]["forwards"], rows[1]["latency_s"]) == ("", "")


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_a_table_of_results_is_the_next_job_s_input_and_no_column_is_lost(tmp_path: Path, ending: str) -> None:
    """Each job's own columns have their names, and the input's all move on by one prefix."""
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    read = {".csv": pandas.read_csv, ".parquet": pandas.read_parquet}[ending]
    frame = pandas.DataFrame({"ticket": ["a", "b"], "body": ["Sam has 3 books .", "Olga has 4 books ."]})
    (frame.to_csv if ending == ".csv" else frame.to_parquet)(tmp_path / f"0{ending}", index=False)
    texts = []
    for number in (1, 2, 3):
        task = {"column": "body"} if number == 1 else {"prompt": "Say {text}"}
        out = tmp_path / f"{number}{ending}"
        given = str(tmp_path / f"{number - 1}{ending}")
        made = config(TaskConfig("batch", input=given, id="ticket", output=str(out), **task), max_new_tokens=4 + number)
        run(made, tmp_path / f"run{number}", World("python"))
        texts.append(list(read(out)["text"]))
    table = read(out)
    assert [list(table[f"{'input.' * number}text"]) for number in range(3)] == texts[::-1]
    assert list(table["input.input.prompt"]) == list(frame["body"])
    assert list(table["input.id"]) == list(table["input.input.id"]) == ["a", "b"]


@pytest.mark.parametrize(
    ("columns", "names"),
    [
        (["text", "input.text", "note"], ["input.text", "input.input.text", "note"]),
        (["input.text", "input.note"], ["input.text", "input.note"]),
        (["input.input.text", "input.text", "text"], ["input.input.input.text", "input.input.text", "input.text"]),
        (["input.input.text", "text"], ["input.input.text", "input.text"]),
    ],
)
def test_columns_of_the_input_have_names_of_their_own(columns: list[str], names: list[str]) -> None:
    found = input_names([], columns)
    assert [found[column] for column in columns] == names


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_a_null_prompt_stays_null(tmp_path: Path, ending: str) -> None:
    pandas, pa = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(
        pa.table({"body": ["Sam has 3 books .", None, ""], "raw": [b"\xff", b"", None]}), tmp_path / "in.parquet"
    )
    task = TaskConfig("batch", input=str(tmp_path / "in.parquet"), column="body", output=str(tmp_path / f"out{ending}"))
    run(config(task, max_new_tokens=4), tmp_path / "run", World("python"))
    if ending == ".csv":
        assert list(pandas.read_csv(tmp_path / "out.csv")["raw"].fillna("")) == ["/w==", "", ""], "base64"
        return
    table = pq.read_table(tmp_path / "out.parquet")
    assert table["prompt"].to_pylist() == ["Sam has 3 books .", None, ""]
    first, *failed = table["text"].to_pylist()
    assert first
    assert failed == [None, None], "a next job takes no empty text for an answer"
    assert table["raw"].to_pylist() == [b"\xff", b"", None]


def test_without_its_input_a_table_has_no_prompts(folder: Path, tmp_path: Path) -> None:
    text = (folder / "in.jsonl").read_text()
    (folder / "in.jsonl").write_text("\n" + "\n".join(text.splitlines()[1:]))
    _, columns, missing = write_table(folder, tmp_path / "t.csv")
    (folder / "in.jsonl").write_text(text)
    assert "prompt" not in columns
    assert "the input has changed since the run" in missing


def test_a_job_whose_input_changes_meanwhile_says_what_its_output_lacks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Sam has 3 books ."}\n{"prompt": "Olga has 3 books ."}\n')
    out = tmp_path / "answers.csv"
    task = TaskConfig("batch", input=str(file), output=str(out))
    report = run(config(task, max_new_tokens=8), tmp_path / "run", World("python"))
    assert "WARNING" not in caplog.text
    assert "prompt" in out.read_text().splitlines()[0]
    file.write_text('{"id": "other", "prompt": "Sam has 4 books ."}\n')
    write_output(tmp_path / "run", report | {"task": report["task"] | {"output": str(out)}})
    assert f"WARNING: {out} is written without prompts: the input has changed since the run" in caplog.text
    assert f"lopa-dist table {tmp_path / 'run'} --out {out}" in caplog.text
    assert "prompt" not in out.read_text().splitlines()[0].split(",")


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_answers_never_stand_beside_the_prompts_of_another_input(tmp_path: Path, ending: str) -> None:
    """Also where the rows are as many and are called the same; the table says so, and the page has no prompts."""
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    given = pandas.DataFrame({"prompt": [f"Sam has {n} books ." for n in "345"], "region": ["x", "y", "z"]})
    file = tmp_path / f"in.{ending}"

    def write(frame: Any) -> None:
        if ending == "parquet":
            frame.to_parquet(file)
        elif ending == "csv":
            frame.to_csv(file, index=False)
        else:
            frame.to_json(file, orient="records", lines=True)

    write(given)
    report = run(config(TaskConfig("batch", None, str(file)), max_new_tokens=16), tmp_path / "run", World("python"))
    for other in (given[::-1], given.assign(region="w")):
        write(given)
        assert not write_table(tmp_path / "run", tmp_path / "out.parquet")[2]
        assert len(questions_again(report)) == 3
        write(other)
        assert "without prompts: the input has changed" in write_table(tmp_path / "run", tmp_path / "out.parquet")[2]
        found = pandas.read_parquet(tmp_path / "out.parquet")
        assert "prompt" not in found
        assert [*found["region"]] == ["x", "y", "z"], "as it was when the answers were made"
        assert questions_again(report) == {}
    write(given[::-1])
    with pytest.raises(ValueError, match="line-1: the task's input has changed since the run"):
        trace(tmp_path / "run", "line-1")


@pytest.mark.parametrize("source", ["in.csv", "*.csv", "."])
def test_a_table_does_not_replace_the_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """Nor does it go where the next job would read it as prompts."""
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "in.csv").write_text("prompt\nSam has 3 books .\n")
    asked = TaskConfig("batch", input=str(tmp_path / "prompts" / source))
    run(config(asked), tmp_path / "run", World("python"))
    monkeypatch.chdir(tmp_path / "prompts")
    for out in ("in.csv", "new.csv"):
        if (source, out) == ("in.csv", "new.csv"):
            continue
        with pytest.raises(UserError, match=r"prompts|would read it"):
            perform("table", [str(tmp_path / "run"), "--out", out])
    assert [file.name for file in Path().iterdir()] == ["in.csv"]
    assert Path("in.csv").read_text() == "prompt\nSam has 3 books .\n"
    perform("table", [str(tmp_path / "run"), "--out", "../new.csv"])
    assert (tmp_path / "new.csv").exists()


def test_what_is_no_run_or_no_table_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "stopped" / "journal").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"stopped: not finished; `lopa-dist status .*stopped` says how it goes on"):
        write_table(tmp_path / "stopped", tmp_path / "x.csv")
    with pytest.raises(ValueError, match=r"no report\.json; name the folder of a finished run"):
        write_table(tmp_path, tmp_path / "t.csv")
    (tmp_path / "report.json").touch()
    with pytest.raises(ValueError, match=r"its results\.jsonl is gone; start its job again with this run folder"):
        write_table(tmp_path, tmp_path / "t.csv")
    with pytest.raises(ValueError, match=r"name a \.csv or a \.parquet file"):
        write_table(folder, tmp_path / "t.xlsx")


@pytest.mark.parametrize("out", ["out.parquet", "out.csv"])
def test_integers_that_no_column_holds_are_texts(tmp_path: Path, out: str) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow: pip install 'lopa_dist[eval]'")
    numbers = [7, 10**24, -(2**63), 2**63]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": "3", "big": n, "one": n}) + "\n" for n in numbers))
    run(config(TaskConfig("batch", input=str(tmp_path / "in.jsonl"))), tmp_path / "run", World("python"))
    write_table(tmp_path / "run", tmp_path / out)
    if out.endswith("parquet"):
        assert parquet.read_table(tmp_path / out)["big"].to_pylist() == [str(n) for n in numbers]
    else:
        with (tmp_path / out).open() as file:
            assert [row["big"] for row in csv.DictReader(file)] == [str(n) for n in numbers]


def test_columns_of_a_parquet_input_keep_their_types(tmp_path: Path) -> None:
    """Of a folder of parts, whose output is in a folder that is made; a row that cannot run keeps its columns, too."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    own = pa.table(
        {
            "text": ["Sam has 2 books .", "", "Sam has 3 books ."],
            "when": pa.array([1, 2, None], pa.timestamp("us")),
            "price": pa.array([Decimal("1.50"), None, Decimal("2.25")], pa.decimal128(6, 2)),
            "raw": pa.array([b"\x00\xff", b"", b"x"]),
            "small": pa.array([1, 2, 3], pa.int32()),
            "pair": pa.array([{"a": 1}, {"a": 2}, {"a": 3}]),
            "forwards": ["x", "y", "z"],
        }
    )
    (tmp_path / "in").mkdir()
    for part in range(2):
        pq.write_table(own, tmp_path / "in" / f"part-{part}.parquet")
    out = tmp_path / "new" / "folder" / "answers.parquet"
    task = TaskConfig("batch", None, str(tmp_path / "in"), output=str(out), column="text", samples=2)
    check_files(config(task))
    run(config(task, temperature=0.5), tmp_path / "run", World("python"))
    found = pq.read_table(out)
    for name in ("when", "price", "raw", "small", "pair"):
        assert found.schema.field(name).type == own.schema.field(name).type
    rows = found.to_pylist()
    assert [row["small"] for row in rows] == [1, 1, 2, 3, 3] * 2
    assert rows[0]["price"] == Decimal("1.50")
    assert rows[0]["raw"] == b"\x00\xff"
    assert [row["input.forwards"] for row in rows[:2]] == ["x", "x"]
    assert type(rows[0]["forwards"]) is int
    with pytest.raises(UserError, match=r"is in the folder task\.input"):
        check_apart(TaskConfig("batch", None, str(tmp_path / "in"), output=str(tmp_path / "in" / "a.parquet")))


def test_integers_and_fractions_of_lines_are_fractions(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where they hold all of them exactly; else, and where values are of other kinds, a warning says what they are."""
    pq = pytest.importorskip("pyarrow.parquet")
    given = [{"score": 5, "code": 2**60, "mixed": 1}, {"score": 5.5, "code": 0.5, "mixed": "one"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": "x"} | line) + "\n" for line in given))
    run(config(TaskConfig("batch", None, str(tmp_path / "in.jsonl"))), tmp_path / "run", World("python"))
    write_table(tmp_path / "run", tmp_path / "out.parquet")
    found = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["score"] for row in found] == [5.0, 5.5]
    assert [(row["code"], row["mixed"]) for row in found] == [(str(2**60), "1"), ("0.5", "one")]
    assert "the table's column mixed has integers and text, which it holds as texts" in caplog.text
    assert "column code has fractions and integers, which" in caplog.text
    assert "column score" not in caplog.text


@pytest.mark.parametrize("source", ["in/part-*.jsonl", "in/*", "**/*.jsonl"])
@pytest.mark.parametrize("out", ["in/part-1.jsonl", "in/part-9.jsonl", "in/part-*.jsonl"])
def test_results_do_not_go_where_the_next_job_reads_prompts(tmp_path: Path, source: str, out: str) -> None:
    with pytest.raises(UserError, match=r"is (one of the files that )?task\.input.*: the results would replace"):
        check_apart(TaskConfig("batch", None, str(tmp_path / source), output=str(tmp_path / out)))
    check_apart(TaskConfig("batch", None, str(tmp_path / source), output=str(tmp_path / "answers.parquet")))


def test_columns_with_several_types_lose_no_value(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They get the type that holds all exactly, else text, and the job says so before it begins."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "in").mkdir()
    late, day = datetime(2026, 1, 2, 3, 4, 5, 678901), date(2026, 1, 2)
    columns = {
        "count": (pa.array([9007199254740993]), pa.array([1.5])),
        "small": (pa.array([1], pa.int16()), pa.array([0.5], pa.float32())),
        "when": (pa.array([day]), pa.array([late])),
        "fine": (pa.array([late], pa.timestamp("us")), pa.array([datetime(2026, 1, 2)], pa.timestamp("ms"))),
        "ticket": (pa.array([1]), pa.array(["A-1"])),
    }
    for part in range(2):
        own = pa.table({"prompt": ["Sam has 2 books ."], **{name: of[part] for name, of in columns.items()}})
        pq.write_table(own, tmp_path / "in" / f"{'ab'[part]}.parquet")
    out = tmp_path / "answers.parquet"
    with caplog.at_level(logging.WARNING, "lopa_dist"):
        run(config(TaskConfig("batch", None, str(tmp_path / "in"), output=str(out))), tmp_path / "run", World("python"))
    found = pq.read_table(out)
    rows = found.to_pylist()
    assert [row["count"] for row in rows] == ["9007199254740993", "1.5"]
    assert [row["small"] for row in rows] == [1.0, 0.5]
    assert [row["when"] for row in rows] == ["2026-01-02", "2026-01-02 03:04:05.678901"]
    assert rows[0]["fine"] == late
    assert [row["ticket"] for row in rows] == ["1", "A-1"]
    assert (
        "column count is int64 in a.parquet and double in b.parquet; a table of the results has string" in caplog.text
    )
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert sum("a table of the results has" in warning for warning in report["warnings"]) == len(columns)


def test_times_that_lose_their_nanoseconds_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    own = {"prompt": ["Sam has 2 books ."], "at": pa.array([1234567], pa.time64("ns"))}
    pq.write_table(pa.table(own), tmp_path / "in.parquet")
    asked = TaskConfig("batch", None, str(tmp_path / "in.parquet"), output=str(tmp_path / "out.parquet"))
    with caplog.at_level(logging.WARNING, "lopa_dist"):
        run(config(asked), tmp_path / "run", World("python"))
    assert "column at is time64[ns], which is read to the microsecond" in caplog.text
    assert pq.read_table(tmp_path / "out.parquet")["at"].to_pylist()[0].microsecond == 1234


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_an_output_goes_where_a_link_leads(tmp_path: Path, ending: str) -> None:
    """As with open(): the link stays, and what it names is no longer what it was."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "answers").write_text("old")
    out = tmp_path / f"out.{ending}"
    out.symlink_to("disk/answers")
    (tmp_path / "in.jsonl").write_text('{"prompt": "Sam has 2 books ."}\n')
    run(
        config(TaskConfig("batch", None, str(tmp_path / "in.jsonl"), output=str(out))),
        tmp_path / "run",
        World("python"),
    )
    assert out.is_symlink()
    assert "Sam has 2 books" in (tmp_path / "disk" / "answers").read_text() or ending == "jsonl"
    assert (tmp_path / "disk" / "answers").read_text() != "old"
    assert [file.name for file in (tmp_path / "disk").iterdir()] == ["answers"]


def test_all_columns_of_a_parquet_input_are_there_whatever_they_hold(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nulls alone, options, and the name of a request; in the input's order, and from another folder."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    own = pa.table(
        {
            "id": [4, 5],
            "nothing": pa.array([None, None], pa.int16()),
            "prompt": ["", "Sam has 3 books ."],
            "temperature": [0.5, 0.25],
            "why": pa.array([None, "x"]),
        }
    )
    pq.write_table(own, tmp_path / "in.parquet")
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.INFO, "lopa_dist"):
        patch.chdir(tmp_path)
        task = TaskConfig("batch", None, "in.parquet", output="answers.parquet")
        run(config(task), tmp_path / "run", World("python"))
    assert "options of a line: temperature (2 lines, the first with 0.5)" in caplog.text
    assert write_table(tmp_path / "run", tmp_path / "again.parquet")[2] == ""
    for name in ("answers.parquet", "again.parquet"):
        found = pq.read_table(tmp_path / name)
        columns = found.column_names
        assert [c for c in columns if c in ("input.id", *own.column_names[1:])] == [
            "prompt", "input.id", "nothing", "temperature", "why"
        ]  # fmt: skip
        assert "error" in columns
        assert columns.index("forwards") > columns.index("why")
        for column in ("nothing", "temperature", "why"):
            assert found.schema.field(column).type == own.schema.field(column).type
        assert found["input.id"].to_pylist() == [4, 5]
        assert found["temperature"].to_pylist() == [0.5, 0.25]
    (tmp_path / "in.parquet").unlink()
    assert "dates, decimals, lists and binary data of the input are texts" in write_table(
        tmp_path / "run", tmp_path / "moved.parquet"
    )[2]  # fmt: skip


def test_options_of_a_csv_pass_through(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("prompt,temperature,top_p\nSam has 3 books .,0.5,0.9\n")
    out = tmp_path / "out.csv"
    run(config(TaskConfig("batch", None, str(tmp_path / "in.csv"), output=str(out))), tmp_path / "run", World("python"))
    with out.open(newline="") as lines:
        [row] = csv.DictReader(lines)
    assert (row["temperature"], row["top_p"]) == ("0.5", "0.9")
    for begins in (True, False):
        told = warnings_of(TaskConfig("batch", None, str(tmp_path / "in.csv"), output=str(out)), begins)
        assert (
            any("is there already: when the job is complete, its results replace it" in said for said in told) == begins
        )
