"""Batch lines in both conventions: what they mean, what is refused, and that no line crashes or gets lost."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lopa_dist.tasks.batch import Batch
from lopa_dist.tasks.batch_line import items_of
from lopa_dist.tasks.hashed_items import HashedItems
from lopa_dist.tasks.response_format import validator
from lopa_dist.tasks.task import RequestSampling
from tests.tasks.batch_files import CHAT, openai, read


def test_each_line_stands_alone(tmp_path: Path) -> None:
    items = read(
        tmp_path, {"custom_id": "line-5", "prompt": "x"}, "", openai({**CHAT, "n": 2}), "{", {"prompt": "again"},
        openai(CHAT), openai({**CHAT, "n": 2}), {"custom_id": "a#1", "prompt": "x"}, {"prompt": "last"},
    )  # fmt: skip
    assert [item.custom_id for item in items] == [
        "line-5", "a#0", "a#1", "line-4", "line-5+", "line-6+", "line-7+", "line-8+", "line-9"
    ]  # fmt: skip
    errors = {item.custom_id: item.error for item in items if item.error}
    assert set(errors) == {"line-4", "line-5+", "line-6+", "line-7+", "line-8+"}
    assert "line 5: custom_id 'line-5' was used in line 1; make it unique" in errors.values()
    assert "line 7: custom_id 'a' was used in line 3; make it unique" in errors.values()
    assert "line 8: custom_id 'a#1' was used in line 3; make it unique" in errors.values()
    assert len(read(tmp_path, *[{"prompt": "x", "n": 2}] * 5, limit=2)) == 4


def test_the_name_of_a_bad_line_is_nobody_else_s(tmp_path: Path) -> None:
    lines = [{"prompt": "x", "id": name} for name in ("x", "x", "line-2")]
    items = read(tmp_path, *lines, {"prompt": "x"}, {"prompt": "x", "id": "line-4"})
    assert [item.custom_id for item in items] == ["x", "line-2+", "line-2", "line-4", "line-5+"]
    assert items[1].error == "line 2: custom_id 'x' was used in line 1; make it unique"
    wanted = "line 5: custom_id 'line-4' was used in line 4, which has no name of its own; make it unique"
    assert items[4].error == wanted


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1), (2, 2), (1, 1), (2, 3)])
def test_an_id_is_used_once_however_many_samples(tmp_path: Path, first: int, second: int) -> None:
    """Answers in OpenAI's form bear the id of the line, without the samples' numbers."""
    items = read(tmp_path, openai({**CHAT, "n": first}), openai({**CHAT, "n": second}), openai({**CHAT, "n": second}))
    assert [item.error for item in items[:first]] == [None] * first
    assert [item.error for item in items[first:]] == [
        f"line {number}: custom_id 'a' was used in line 1; make it unique" for number in (2, 3)
    ]
    named = [item.origin.custom_id for item in items if item.origin]
    assert named == [*["a"] * first, "line-2+", "line-3+"], "an error does not take an answer's place"


def test_a_line_may_not_be_called_like_a_sample(tmp_path: Path) -> None:
    items = read(tmp_path, {"custom_id": "a#1", "prompt": "x"}, {"custom_id": "a", "prompt": "x", "n": 2})
    assert [item.error for item in items] == [None, "line 2: custom_id 'a#1' was used in line 1; make it unique"]


def test_a_template_of_blank_columns_alone_asks_nothing(tmp_path: Path) -> None:
    line = {"title": "Fine", "text": " "}
    good, bad = read(tmp_path, line, line | {"title": ""}, prompt="Classify: {title} {text}")
    assert good.prompt == "Classify: Fine  "
    assert bad.error == "line 2: title is empty, and task.prompt asks for it; give it a value, or leave the line out"


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl"])
def test_a_column_called_body_is_not_taken_for_an_openai_line(tmp_path: Path, kind: str) -> None:
    """Mails and reviews have one. Beside a prompt it passes through; alone, task.column must name it."""
    rows = [{"body": "Fine.", "stars": 4}, {"body": "Late.", "stars": 1}]
    file = tmp_path / f"reviews.{kind}"

    def write(rows: list[dict[str, Any]]) -> None:
        if kind == "parquet":
            pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
            pq.write_table(pa.Table.from_pylist(rows), file)
        elif kind == "csv":
            file.write_text("".join(",".join(map(str, row)) + "\n" for row in [rows[0], *(r.values() for r in rows)]))
        else:
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    write(rows)
    if kind == "jsonl":
        assert "if it is the prompt itself, give task.column=body" in str(next(iter(Batch(str(file)).items())).error)
    else:
        with pytest.raises(ValueError, match=r"it has body, stars: task\.column=NAME says which is the prompt"):
            list(Batch(str(file)).items())
    assert [item.prompt for item in Batch(str(file), column="body").items()] == ["Fine.", "Late."]
    write([{"prompt": f"Say {n}.", "body": "Fine."} for n in range(2)])
    items = list(Batch(str(file)).items())
    assert [(item.prompt, item.metadata) for item in items] == [(f"Say {n}.", {"body": "Fine."}) for n in range(2)]


def test_a_prompt_of_several_columns(tmp_path: Path) -> None:
    line = {"text": "So {good}!", "star rating": 5, "tags": ["a"], "prompt": "data"}
    (item,) = read(tmp_path, line, prompt="Rate {{1-5}}: {text} ({star rating}, {tags}) {text}")
    assert item.prompt == 'Rate {1-5}: So {good}! (5, ["a"]) So {good}!'
    assert item.metadata == line
    good, missing, empty = read(tmp_path, {"text": "x"}, {"txt": "x"}, {"text": None}, prompt="Is {text} good?")
    assert good.prompt == "Is x good?"
    assert missing.error == (
        "line 2: task.prompt asks for {text}, but it has txt; write a column's name exactly, "
        "and a brace that is part of the text twice"
    )
    assert empty.error is not None
    assert empty.error.startswith("line 3: text is null, and task.prompt asks for it")
    (tmp_path / "t.csv").write_text("txt\nx\n")
    with pytest.raises(ValueError, match=r"t\.csv: task\.prompt asks for \{text\}, but it has txt"):
        list(Batch(str(tmp_path / "t.csv"), prompt="{text}").items())
    for wrong in ("no column", "{", "}", "{}", "{{text}}"):
        with pytest.raises(ValueError, match=r"task\.prompt="):
            Batch("x.csv", prompt=wrong)


def test_what_stands_for_nothing_in_tables_of_numbers(tmp_path: Path) -> None:
    """NaN is a null; integers beside empty cells are floats, as pandas writes both."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = {"title": ["a", "b"], "weight": [1.5, math.nan], "n": [2.0, None], "seed": [7.0, math.nan]}
    pq.write_table(pa.table(table), tmp_path / "t.parquet")
    first, *same, bad = Batch(str(tmp_path / "t.parquet"), prompt="{title}: {weight}").items()
    assert (first.prompt, len(same)) == ("a: 1.5", 1)
    assert first.sampling is not None
    assert first.sampling.seed == 7
    assert (
        bad.error
        == "line 2: weight is not a number, and task.prompt asks for it; give it a value, or leave the line out"
    )
    [item] = items_of({"prompt": "x", "n": 2.5}, 1)
    assert "n=2.5 must be an integer" in str(item.error)
    [item] = items_of({"prompt": "x", "max_tokens": 20.0, "seed": np.int64(7)}, 1)  # as pandas has them
    assert item.error is None
    assert (item.max_new_tokens, item.sampling and item.sampling.seed) == (20, 7)


def test_an_empty_cell_of_the_prompt_is_called_that(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("sep=;\nid;prompt\n1;one, and two\n2;\n")
    one, two = Batch(str(tmp_path / "t.csv")).items()
    assert one.prompt == "one, and two"
    assert two.error == "line 2: prompt is empty; give it a text, or leave the line out"


def test_what_of_a_folder_is_not_read_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "kind=lamp").mkdir()
    (tmp_path / "kind=lamp" / "a.jsonl").write_text('{"prompt": "x"}\n{"prompt": 5}\n')
    (tmp_path / "b.json").write_text('[{"prompt": "y"}]')
    (tmp_path / "c.jsonl").write_text('{"prompt": "z"}\n')
    with caplog.at_level("INFO", "lopa_dist"):
        items = list(Batch(str(tmp_path)).items())
    assert [item.prompt for item in items] == ["z", "x", None]
    assert str(items[2].error).startswith("line 3 (kind=lamp/a.jsonl, line 2): prompt must be a text")
    assert ".json files beside others are not read: b.json; to read them, name" in caplog.text
    assert "values in the names of folders do not become columns (kind=lamp)" in caplog.text
    caplog.clear()
    list(Batch(str(tmp_path / "c.jsonl")).items())
    assert not caplog.messages


def test_options_and_words_that_mean_nothing_are_told_of_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = [{"prompt": "x", "max_tokens": 3}, {"prompt": "NULL"}, {"body": {"prompt": "y", "seed": 1}}]
    with caplog.at_level("INFO", "lopa_dist"):
        read(tmp_path, *given)
        read(tmp_path, *given)
    assert caplog.messages == [
        "options of a line: max_tokens (1 lines, the first with 3); a field that should only be passed through needs "
        "another name",
        "WARNING: prompts that are the word NULL: 1; leave them out if they are missing values",
    ]


def test_an_empty_text_is_one_in_every_table(tmp_path: Path) -> None:
    """CSV has no null: an empty cell is an empty text there, as in Parquet."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"title": ["Fine", "", None], "text": ["", "", "x"]}), tmp_path / "t.parquet")
    (tmp_path / "t.csv").write_text("title,text\nFine,\n,\n,x\n")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "0.csv").write_text("title,text\nFine,\n,\n,x\n")
    found = {}
    for name in ("t.parquet", "t.csv", "parts"):
        items = list(Batch(str(tmp_path / name), prompt="{title}: {text}").items())
        assert (items[0].prompt, items[1].prompt) == ("Fine: ", None)
        where = " (0.csv, line 2)" if name == "parts" else ""
        assert items[2].origin
        assert items[2].origin.where == ("0.csv, line 3" if name == "parts" else "")
        assert str(items[1].error).startswith(f"line 2{where}: title is empty, and task.prompt asks for it")
        found[name] = items[2]
    assert str(found["t.parquet"].error).startswith("line 3: title is null, and task.prompt asks for it")
    assert [found[name].prompt for name in ("t.csv", "parts")] == [": x"] * 2
    one = [list(Batch(str(tmp_path / name), column="text").items()) for name in ("t.parquet", "t.csv")]
    assert one[0][0].error == one[1][0].error == "line 1: text is empty; give it a text, or leave the line out"


def test_every_column_of_a_table_passes_through(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Options, of which a line tells, the id as it was, nulls, and the cells of rows that cannot be used."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"id": [4, 4], "prompt": ["x", "y"], "temperature": [0.5, None], "seed": [1, 2], "note": [None, None]}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    with caplog.at_level("INFO", "lopa_dist"):
        first, second = Batch(str(tmp_path / "t.parquet")).items()
    assert first.metadata == {"id": 4, "temperature": 0.5, "seed": 1, "note": None}
    assert second.metadata == {"id": 4, "temperature": None, "seed": 2, "note": None}
    assert (second.custom_id, first.sampling) == ("line-2+", RequestSampling(0.5, None, None, 1))
    told = "temperature (1 lines, the first with 0.5), seed (2 lines, the first with 1)"
    assert f"options of a line: {told}" in caplog.text
    bad = b"id,prompt,day\na,x,Monday,more\nb,y\nc,caf\xe9,Friday\n"
    (tmp_path / "t.csv").write_bytes(bad)
    items = list(Batch(str(tmp_path / "t.csv")).items())
    assert [(item.custom_id, item.metadata) for item in items] == [
        ("a", {"id": "a", "day": "Monday"}),
        ("b", {"id": "b", "day": None}),
        ("c", {"id": "c", "day": "Friday"}),
    ]
    assert [str(item.error).split(";")[0] for item in items] == [
        "line 1: it has 4 columns, and the first line names 3",
        "line 2: it has 2 columns, and the first line names 3",
        "line 3: not UTF-8",
    ]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "no prompt or messages in it; it has question: task.column=NAME says which is the prompt"),
        ({"column": "text"}, "no text in it; it has question: task.column=NAME says which is the prompt"),
        ({"prompt": "Say {text}"}, "task.prompt asks for {text}, but it has question; write a column's name exactly"),
        ({"column": "question", "id": "name"}, "no name in it; it has question: task.id=NAME says which names"),
    ],
)
def test_a_field_that_no_line_has_is_a_mistake_of_the_command(
    tmp_path: Path, options: dict[str, str], reason: str
) -> None:
    """Not one of each line, which would end as a million records."""
    lines = ["no JSON", {"question": "x"}, {"question": "y"}]
    with pytest.raises(ValueError, match=re.escape(f"none of its lines can be used. line 2: {reason}")):
        read(tmp_path, *lines, **options)
    every = {"question": "z", "text": "x", "prompt": "x", "name": "n"}
    assert [item.error is None for item in read(tmp_path, *lines, every, **options)] == [False] * 3 + [True]


def test_a_column_of_names(tmp_path: Path) -> None:
    lines = [{"review_id": 7, "prompt": "x", "id": 1}, {"review_id": "b", "prompt": "y"}, {"prompt": "z"}]
    first, second, bad = read(tmp_path, *lines, id="review_id")
    assert (first.custom_id, second.custom_id) == ("7", "b")
    assert first.metadata == {"review_id": 7, "id": 1}
    assert bad.error == "line 3: no review_id in it; it has prompt: task.id=NAME says which names a request"
    first, second = read(tmp_path, *lines[:2], id="review_id", column="prompt")
    assert (first.custom_id, second.custom_id) == ("7", "b")


def test_a_format_for_all_lines(tmp_path: Path) -> None:
    """In each way of writing it; a line's own goes before."""
    own = {"prompt": "x", "response_format": {"type": "text"}}
    schema = {"type": "object", "required": ["a"]}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    for written, expected in (
        ("json_object", None),
        ({"type": "json_object"}, None),
        (str(tmp_path / "schema.json"), schema),
        ({"type": "json_schema", "json_schema": {"schema": schema}}, schema),
    ):
        first, second = read(tmp_path, {"prompt": "x"}, own, response_format=written, tries=5)
        assert first.response_format is not None
        assert first.response_format.tries == 5
        assert first.response_format.schema == (None if expected is None else json.dumps(expected, sort_keys=True))
        assert second.response_format is None
    for wrong in ("json", {"type": "xml"}, "none.json"):
        with pytest.raises(ValueError, match=r"task\.response_format="):
            Batch("x.csv", response_format=wrong)


def test_json_text_in_a_parquet_column_is_read_as_in_a_csv_table(tmp_path: Path) -> None:
    pq, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    row = {"prompt": "x", "response_format": '{"type": "json_object"}', "stop": '["a", "b"]', "temperature": "0.5"}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "t.parquet")
    (item,) = Batch(str(tmp_path / "t.parquet")).items()
    assert item.error is None
    assert item.response_format is not None
    assert (item.stop, item.sampling) == (("a", "b"), RequestSampling(0.5))
    chat = [{"messages": json.dumps(CHAT["messages"])}]
    pq.write_table(pa.Table.from_pylist(chat), tmp_path / "t.parquet")
    (item,) = Batch(str(tmp_path / "t.parquet")).items()
    assert item.messages == CHAT["messages"]


def test_samples_of_a_whole_file(tmp_path: Path) -> None:
    items = read(tmp_path, {"prompt": "x"}, {"prompt": "y", "n": 1}, samples=2)
    assert [item.custom_id for item in items] == ["line-1#0", "line-1#1", "line-2"]


def test_a_parquet_file_s_other_columns_pass_through(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="needs datasets: pip install 'lopa_dist[eval]'")
    lines = [
        {"custom_id": "a", "prompt": "Hi", "body": None, "score": 1},
        {"custom_id": "b", "prompt": None, "body": {"prompt": "Ho"}, "score": 2},
        {"custom_id": "c", "prompt": "Hu", "body": None, "score": None},
    ]
    datasets.Dataset.from_list(lines).to_parquet(tmp_path / "x.parquet")
    items = list(Batch(str(tmp_path / "x.parquet")).items())
    assert [(item.custom_id, item.prompt, item.error) for item in items] == [
        ("a", "Hi", None), ("b", "Ho", None), ("c", "Hu", None)
    ]  # fmt: skip
    assert [item.metadata for item in items] == [{"body": None, "score": 1}, None, {"body": None, "score": None}]


def test_an_input_is_the_same_in_files_of_other_names(tmp_path: Path) -> None:
    """A run goes on with an input whose files were renamed."""
    line = json.dumps({"prompt": "x"}) + "\n"
    hashes = set()
    for names in (["a.jsonl", "b.jsonl"], ["c.jsonl", "d.jsonl"]):
        folder = tmp_path / names[0][0]
        folder.mkdir()
        for name in names:
            (folder / name).write_text(line)
        items = HashedItems(Batch(str(folder)).items())
        assert [item.origin and item.origin.where for item in items] == [f"{name}, line 1" for name in names]
        hashes.add(items.digest())
    assert len(hashes) == 1


def test_results_of_an_earlier_job_that_ended_with_errors_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = [{"id": str(i), "text": "x", "finish_reason": reason} for i, reason in enumerate(("stop", "error", "error"))]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in made))
    with caplog.at_level("WARNING", "lopa_dist"):
        assert len(list(Batch(str(tmp_path / "in.jsonl"), prompt="Say {text}").items())) == 3
    assert "finish_reason=error, which an earlier job did not answer: 2; leave them out" in caplog.text


def test_no_line_is_blamed_for_a_missing_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    validator.cache_clear()
    monkeypatch.setitem(sys.modules, "jsonschema.exceptions", None)
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "array"}}}
    with pytest.raises(ValueError, match=r"^a json_schema needs jsonschema: pip install"):
        read(tmp_path, {"prompt": "x"}, {"prompt": "x", "response_format": schema})
