"""Parts of `task.output`, such as `answers/part-*.parquet`, are written while the job runs."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from lopa_dist.checks import UserError
from lopa_dist.config import JobConfig, TaskConfig, check_files
from lopa_dist.jobs.commands.shards import merge_shards
from lopa_dist.jobs.folder import own_parts, part_names
from lopa_dist.jobs.folder.journal import Location
from lopa_dist.jobs.run import job, parts
from lopa_dist.jobs.run.job import run
from lopa_dist.jobs.show.report import read_report
from lopa_dist.parallel.launcher import World
from tests.jobs.run.test_job import config, lines

ROWS = [{"review": f"{n} books", "stars": n, "max_tokens": 4} for n in range(2, 12)]
ROWS[5]["review"] = ""


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (part_names, parts):
        monkeypatch.setattr(module, "ANSWERS", 4)
    monkeypatch.setattr(parts, "EVERY_S", 0.0)


def task(folder: Path, rows: list[dict[str, Any]] = ROWS, ending: str = "jsonl", **options: Any) -> TaskConfig:
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = f"{folder}/answers/part-*.{ending}"
    made = TaskConfig("batch", None, str(folder / "in.jsonl"), output=out, column="review", **options)
    check_files(config(made))
    return made


def read(folder: Path, ending: str = "jsonl") -> list[list[dict[str, Any]]]:
    """The rows of each part."""
    files = sorted((folder / "answers").iterdir())
    assert [file.name for file in files] == [f"part-{n:05d}.{ending}" for n in range(len(files))]
    if ending == "jsonl":
        return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    if ending == "csv":
        return [list(csv.DictReader(file.open())) for file in files]
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow: pip install 'lopa_dist[eval]'")
    return [parquet.read_table(file).to_pylist() for file in files]


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_parts_are_there_before_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    before = []

    def end(folder: Path, report: dict[str, Any]) -> None:
        before.extend(read(tmp_path, ending))
        write_output(folder, report)

    write_output = job.write_output
    monkeypatch.setattr(job, "write_output", end)
    seen: list[int] = []
    made = config(task(tmp_path, ending=ending))
    made.engine.max_sequences = 2
    write_part = parts.Parts.write_part

    def write(self: parts.Parts, number: int, written: list[dict[str, Any]]) -> None:
        seen.append(sum(self.ended))
        write_part(self, number, written)

    monkeypatch.setattr(parts.Parts, "write_part", write)
    run(made, tmp_path / "run", World("python"))
    assert seen[0] < len(ROWS)  # the first part did not wait for the last request
    after = read(tmp_path, ending)
    assert [len(part) for part in after] == [4, 4, 2]
    wanted = lines(tmp_path / "run")
    assert [row["text"] or "" for part in after for row in part] == [line["text"] for line in wanted]
    assert before
    for early, late in zip(before, after, strict=False):
        # at the end, parts have the columns that others have, too
        assert [{key: new.get(key) for key in old} for old, new in zip(early, late, strict=True)] == early
    if ending != "jsonl":
        assert {*after[0][0]} == {*after[2][0]}
        assert [row["prompt"] for row in after[0]] == [row["review"] for row in ROWS[:4]]


def test_an_input_that_grows_and_shrinks(tmp_path: Path) -> None:
    for count in (3, 10):
        run(config(task(tmp_path, ROWS[:count])), tmp_path / "run", World("python"))
        assert sum(map(len, read(tmp_path))) == count
    run(config(task(tmp_path, ROWS[:3])), tmp_path / "run", World("python"))
    assert [len(part) for part in read(tmp_path)] == [3], "its own parts of the longer input are gone"
    (tmp_path / "answers" / "part-00001.jsonl").write_text("another's")
    with pytest.raises(UserError, match=r"parts of another job \(part-00001\.jsonl\); remove them"):
        run(config(task(tmp_path, ROWS[:3])), tmp_path / "run", World("python"))


def test_a_job_whose_answers_have_all_changed_replaces_its_own_parts(tmp_path: Path) -> None:
    run(config(task(tmp_path)), tmp_path / "run", World("python"))
    changed = [row | {"review": f"again {row['review']}"} for row in ROWS]
    run(config(task(tmp_path, changed)), tmp_path / "run", World("python"))
    assert [len(part) for part in read(tmp_path)] == [4, 4, 2]


def test_parts_of_another_job_are_not_mixed_with_new_ones(tmp_path: Path) -> None:
    run(config(task(tmp_path)), tmp_path / "run", World("python"))
    with pytest.raises(UserError, match=r"parts of another job \(part-00000\.jsonl to part-00002\.jsonl\)"):
        run(config(task(tmp_path)), tmp_path / "other", World("python"))
    run(config(task(tmp_path)), tmp_path / "run", World("python"))  # its own are


def test_a_job_that_starts_over_replaces_its_own_parts(tmp_path: Path) -> None:
    run(config(task(tmp_path)), tmp_path / "run", World("python"))
    anew = replace(config(task(tmp_path, ROWS[:6])), job=JobConfig(resume="new"))
    run(anew, tmp_path / "run", World("python"))
    assert [len(part) for part in read(tmp_path)] == [4, 2]
    assert (tmp_path / "run" / "journal.old" / "settings.json").exists()


@pytest.mark.parametrize("note", ["", "[]", "{}", '{"output": 3}'])
def test_a_damaged_note_of_parts_is_none(tmp_path: Path, note: str) -> None:
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "parts.json").write_text(note)
    assert own_parts.parts_written(tmp_path, "a/part-*.csv") == 0
    own_parts.note_parts(tmp_path, "a/part-*.csv", 2)
    assert own_parts.parts_written(tmp_path, "a/part-*.csv") == 2
    (tmp_path / "journal" / "parts.json").write_text(json.dumps({"output": part_names.place_of("a/part-*.csv")}))
    assert own_parts.parts_written(tmp_path, "a/part-*.csv") == 0


def test_an_answer_that_is_generated_again_is_in_no_part_before(tmp_path: Path) -> None:
    """Its verdict is missing, or it lacks its format and may have more tries."""
    job_input = MagicMock(rejected=bytearray(5))
    job_input.__len__.return_value = 5
    entries = [
        (0, {"figures": {}}, Location(tmp_path / "001-000.jsonl", 0, 1)),
        (1, {"figures": {}, "unjudged": True}, Location(tmp_path / "001-000.jsonl", 1, 1)),
        (2, {}, Location(tmp_path / "001-000.jsonl", 2, 1)),  # an error
        (3, {"figures": {}, "attempt": 1}, Location(tmp_path / "002-000.jsonl", 0, 1)),  # judged again
        (4, {"figures": {}}, Location(tmp_path / "002-000.jsonl", 1, 1)),
    ]
    journal: Any = SimpleNamespace(entries_of=lambda ids, read_to: iter(entries))
    made = parts.Parts(task(tmp_path), tmp_path, job_input, journal, 2, bytearray([1, 0, 0, 0, 0]))
    made.read()
    made.thread.close()
    assert list(made.ended) == [1, 0, 0, 0, 1]


def test_a_failure_waits_for_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def fail(*_: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(parts.Parts, "write_part", fail)
    run(config(task(tmp_path)), tmp_path / "run", World("python"))
    assert "could not be written before the end of the job: OSError: no room" in caplog.text
    assert [len(part) for part in read(tmp_path)] == [4, 4, 2]


def test_parts_of_an_array_are_written_when_it_is_merged(tmp_path: Path) -> None:
    for shard in range(2):
        made = task(tmp_path, shard=shard, shards=2)
        run(config(made), tmp_path / "runs" / str(shard), World("python"))
    assert not (tmp_path / "answers").exists()
    merge_shards(tmp_path / "runs")
    assert [row["custom_id"] for part in read(tmp_path) for row in part] == [f"line-{n}" for n in range(1, 11)]


@pytest.mark.parametrize("output", ["a*/part-*.csv", "a*/part.csv", "a/*-*.csv"])
def test_one_star_is_the_number(output: str) -> None:
    with pytest.raises(ValueError, match=r"one \* in the name of the file stands for a part's number"):
        TaskConfig(output=output)
    with pytest.raises(ValueError, match=r"task\.output=answers/: name a file .* or FOLDER/part-\*\.parquet for parts"):
        TaskConfig(output="answers/")


def test_a_job_of_errors_alone_has_parts(tmp_path: Path) -> None:
    run(config(task(tmp_path, [{"review": ""}])), tmp_path / "run", World("python"))
    assert read_report(tmp_path / "run" / "report.json")["errors"] == 1
    assert [len(part) for part in read(tmp_path)] == [1]


@pytest.mark.parametrize("early", [False, True])
def test_parts_of_another_job_that_runs_meanwhile_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    """Whichever has written a part first, the one that ends later notices."""
    (tmp_path / "other").mkdir()
    mine, other = config(task(tmp_path)), config(task(tmp_path / "other", ROWS[::-1]))
    other.task.output = mine.task.output
    write_output = job.write_output

    def end(folder: Path, report: dict[str, Any]) -> None:
        if folder.name == "mine":
            run(other, tmp_path / "others", World("python"))
        write_output(folder, report)

    monkeypatch.setattr(job, "write_output", end)
    if not early:
        monkeypatch.setattr(parts.Parts, "__call__", lambda *_: None)
    with pytest.raises(UserError, match=r"parts of another job \(.*\); remove them, or name another folder"):
        run(mine, tmp_path / "mine", World("python"))
    if not early:
        assert [row["text"] for part in read(tmp_path) for row in part] == [
            line["text"] for line in lines(tmp_path / "others")
        ]
