"""Batch lines in both conventions: what they mean, what is refused, and that no line crashes or gets lost."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lopa_dist.tasks.batch import Batch
from lopa_dist.tasks.batch_line import items_of
from lopa_dist.tasks.hashed_items import HashedItems
from lopa_dist.tasks.response_format import validator
from lopa_dist.tasks.rows import parse
from lopa_dist.tasks.task import Item, Origin, RequestSampling, Score

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def openai(body: dict[str, Any], url: str = "/v1/chat/completions", **more: Any) -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": url, "body": {"model": "m", **body}, **more}


def read(tmp_path: Path, *lines: Any, **options: Any) -> list[Item]:
    file = tmp_path / "in.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return list(Batch(str(file), **options).items())


def test_every_sampling_field() -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "seed": 7,
        "stop": ["\n", "END"],
        "max_completion_tokens": 9,
    }
    expected = Item(
        "a", messages=CHAT["messages"], max_new_tokens=9, stop=("\n", "END"), sampling=RequestSampling(0.5, 0.9, 4, 7),
    )  # fmt: skip
    (simple,) = items_of({"custom_id": "a", **CHAT, **fields}, 3)
    (wrapped,) = items_of(openai({**CHAT, **fields}), 3)
    assert simple == replace(expected, origin=Origin(3, "a"))
    assert wrapped == replace(expected, origin=Origin(3, "a", "chat", 0, "m"))
    (least,) = items_of({"prompt": "x", "seed": None, "n": None, "stop": "."}, 1)
    assert least == Item("line-1", "x", stop=(".",), origin=Origin(1, "line-1"))


def test_completions_and_content_parts() -> None:
    (item,) = items_of(openai({"prompt": "x", "max_tokens": 5}, "/v1/completions"), 1)
    assert (item.prompt, item.max_new_tokens, item.origin.form) == ("x", 5, "completion")
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    (item,) = items_of(openai({"messages": [{"role": "user", "content": parts}], "stream": False, "user": "me"}), 1)
    assert item.messages == [{"role": "user", "content": "Hello"}]


def test_samples_have_ids_of_their_own() -> None:
    items = items_of(openai({**CHAT, "n": 3}), 1)
    assert [item.custom_id for item in items] == ["a#0", "a#1", "a#2"]
    assert [item.origin.sample for item in items] == [0, 1, 2]
    assert {item.origin.custom_id for item in items} == {"a"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"prompt": "x", "temperature": -1}, ["temperature", "at least 0"]),
        ({"prompt": "x", "temperature": "hot"}, ["temperature", "number"]),
        ({"prompt": "x", "temperature": True}, ["temperature", "number"]),
        ({"prompt": "x", "temperature": float("nan")}, ["temperature"]),
        ({"prompt": "x", "top_p": 0}, ["top_p", "above 0"]),
        ({"prompt": "x", "top_k": 1.5}, ["top_k", "integer"]),
        ({"prompt": "x", "seed": 2**63}, ["seed", "integer"]),
        ({"prompt": "x", "stop": ["a", ""]}, ["stop", "non-empty"]),
        ({"prompt": "x", "stop": {"a": 1}}, ["stop"]),
        ({"prompt": "x", "stop": "a\ufffd"}, ["stop", "U+FFFD"]),
        ({"prompt": "x", "stop": "a\ud800"}, ["stop", "half of a surrogate pair"]),
        ({"prompt": "x", "n": 0}, ["n=0", "from 1 to 128"]),
        ({"prompt": "x", "n": 129}, ["n=129"]),
        ({"prompt": "x", "max_tokens": 1, "max_completion_tokens": 1}, ["either max_tokens"]),
        ({"prompt": ["x", "y"]}, ["one line for each"]),
        ({"prompt": "x", **CHAT}, ["either prompt or messages"]),
        ({"messages": []}, ["messages"]),
        ({"messages": [{"role": "user"}]}, ["messages", "content"]),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, ["read only text"]),
        ({"prompt": "x", "temprature": 1}, ["'temprature'", "did you mean temperature", "task.column=prompt"]),
        ({"prompt": "x", "id": ["a"]}, ["id", "string or an integer"]),
        ({"prompt": "x", "presence_penalty": 1}, ["presence_penalty", "not supported; remove"]),
        ({"prompt": "x", "custom_id": 5}, ["custom_id", "string"]),
        (openai(CHAT, extra=1), ["'extra'", "body"]),
        (openai(CHAT, "/v1/embeddings"), ["url", "/v1/chat/completions"]),
        (openai(CHAT, "/v1/completions"), ["needs prompt"]),
        (openai(CHAT) | {"method": "GET"}, ["POST"]),
        (openai(CHAT) | {"body": "x"}, ["body must be an object"]),
        (openai({**CHAT, "stream": True}), ["stream", "not supported; remove"]),
        (openai({**CHAT, "logprobs": 0}), ["logprobs=0 must be true or false"]),
        (openai({**CHAT, "logprobs": True, "top_logprobs": 2}), ["top_logprobs", "not supported"]),
        ({"prompt": "x", "logprobs": 5}, ["logprobs=5", "other tokens"]),
        ({"prompt": "x", "logprobs": 0.5}, ["logprobs=0.5"]),
        (openai({**CHAT, "presence_penalty": 0.5}), ["presence_penalty"]),
        (openai({**CHAT, "frobnicate": 1}), ["'frobnicate'", "known"]),
        (openai({**CHAT, "model": 5}), ["model must be a string"]),
    ],
)
def test_refusals_name_line_field_and_remedy(line: dict[str, Any], words: list[str]) -> None:
    (item,) = items_of(line, 12)
    assert str(item.error).startswith("line 12: ")
    for word in words:
        assert word in str(item.error)


def test_a_field_like_one_that_is_given_passes_through() -> None:
    """Data sets number prompts in `prompt_id`, and put chats beside their first `message`."""
    (item,) = items_of({"prompt": "x", "prompt_id": "p7", "message": "y", "seed": 3, "seeds": [1]}, 12)
    assert item.error is None
    assert item.metadata == {"prompt_id": "p7", "message": "y", "seeds": [1]}
    (item,) = items_of({"promt": "x", "max_token": 5}, 12)
    assert "did you mean prompt?" in str(item.error)


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


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.just("a"),
    st.lists(st.one_of(st.text(max_size=3), st.integers(), st.just({"role": "user", "content": "x"})), max_size=2),
    st.dictionaries(st.sampled_from(["role", "content", "type", "text", "prompt"]), st.text(max_size=3), max_size=2),
)  # fmt: skip
SEEDS = [
    {"prompt": "Hello"},
    {"custom_id": "a", **CHAT, "max_tokens": 5, "temperature": 0.5, "stop": ["."], "seed": 1},
    openai({**CHAT, "n": 2, "top_p": 0.5, "max_completion_tokens": 3}),
    openai({"prompt": "x", "stop": "."}, "/v1/completions"),
]


@st.composite
def mutated_lines(draw: st.DrawFn) -> bytes:
    """A good line with fields replaced, added or dropped, and bytes changed, dropped or put in."""
    line = json.loads(json.dumps(draw(st.sampled_from(SEEDS))))
    for _ in range(draw(st.integers(0, 3))):
        target = line["body"] if isinstance(line.get("body"), dict) and draw(st.booleans()) else line
        key = draw(
            st.one_of(st.sampled_from([*target, "n", "seed", "stop", "body", "url", "top_k"]), st.text(max_size=3))
        )
        if draw(st.booleans()):
            target[key] = draw(VALUES)
        else:
            target.pop(key, None)
    raw = bytearray(json.dumps(line, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass"))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(raw)))
        raw[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(raw).replace(b"\n", b" ").replace(b"\r", b" ")


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(lines=st.lists(mutated_lines(), min_size=10, max_size=10))
def test_2000_mutated_lines_give_one_record_each(lines: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzz.jsonl"
    usable = b'{"prompt": "x"}'  # a file without any such line is refused as a whole
    file.write_bytes(b"\n".join([*lines, usable]))
    items = list(Batch(str(file)).items())
    text = file.read_text(encoding="utf-8-sig", errors="surrogateescape")
    expected = [number for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    seen = dict.fromkeys(item.origin.line for item in items if item.origin)
    assert list(seen) == expected
    assert all(item.origin for item in items)
    assert len({item.custom_id for item in items}) == len(items)
    for number in expected:
        of_line = [item for item in items if item.origin.line == number]
        if any(item.error for item in of_line):
            assert len(of_line) == 1
            assert str(of_line[0].error).startswith(f"line {number}: ")
        else:
            assert [item.origin.sample for item in of_line] == list(range(len(of_line)))
            assert all((item.prompt is None) != (item.messages is None) for item in of_line)
        json.dumps([(item.custom_id, item.error) for item in of_line], ensure_ascii=False).encode()


@pytest.mark.parametrize("bad", [b'"caf\xe9"', b'"\\ud800"'])
def test_a_line_that_is_not_utf_8_keeps_what_can_be_read_of_it(bad: bytes, tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_bytes(b'{"custom_id": "a", "prompt": ' + bad + b', "day": "Monday"}\n[' + bad + b"]\n")
    first, second = Batch(str(file)).items()
    assert (first.custom_id, first.metadata) == ("a", {"day": "Monday"})
    assert first.error == "line 1: not UTF-8, or half of a surrogate pair; write UTF-8"
    assert (second.custom_id, second.error) == ("line-2", first.error.replace("1", "2"))


def test_deep_and_huge_json_are_refused() -> None:
    for text in ("[" * 100_000, '{"prompt": ' + "9" * 10_000 + "}", '{"a":' * 50_000):
        assert parse(text, 1).error.startswith("line 1: not JSON")


def test_null_fields_count_as_not_given(tmp_path: Path) -> None:
    """As in Parquet, where every row has every column."""
    nothing = {"body": None, "method": None, "url": None, "messages": None, "n": None, "extra": None}
    body = {"prompt": "Hi", "stream_options": None, "messages": None, "temperature": None}
    raw = [{"prompt": "Hi"}, {"custom_id": "b", "body": {"prompt": "Hi"}}]
    full = [nothing | raw[0], {"custom_id": "b", "method": None, "url": None, "prompt": None, "body": body}]
    found = read(tmp_path, *full)
    assert [replace(item, metadata=None) for item in found] == read(tmp_path, *raw)
    assert [item.metadata for item in found] == [dict.fromkeys(("body", "method", "url", "extra")), None]
    assert not any(item.error for item in read(tmp_path, *full))


def test_other_fields_pass_through_and_an_id_names_the_request(tmp_path: Path) -> None:
    """In a file of lines, in tables, and with a field of another name for the prompt."""
    own = {"expected": "8", "url": "http://x"}
    (item,) = read(tmp_path, {"id": 7, "prompt": "x", **own})
    assert (item.custom_id, item.prompt, item.metadata) == ("7", "x", own)
    (item,) = read(tmp_path, {"id": 7, "custom_id": "a", "prompt": "x"})
    assert (item.custom_id, item.metadata) == ("a", {"id": 7})
    (item,) = read(tmp_path, {"id": 7, "question": "x", "temprature": 1, "prompt": "y"}, column="question")
    assert (item.custom_id, item.prompt, item.metadata) == ("7", "x", {"temprature": 1, "prompt": "y"})
    (bad,) = read(tmp_path, {"id": 7, "question": None, "day": 1}, column="question")
    assert (bad.custom_id, bad.metadata) == ("7", {"day": 1})
    assert bad.error == "line 1: question is null; give it a prompt, or leave the line out"
    bad, _ = read(tmp_path, {"custom_id": "a", "question": "x"}, {"prompt": "x"})
    assert bad.error
    assert "line 1: no prompt or messages in it; if the field of the prompt" in bad.error
    bad, _ = read(tmp_path, {"question": "x"}, {"prompt": "x"}, column="prompt")
    assert bad.error == "line 1: no prompt in it; it has question: task.column=NAME says which is the prompt"
    (tmp_path / "t.csv").write_text("prompt,logprobs\nx,true\nx,FALSE\nx,\nx,maybe\nx,0\n")
    items = list(Batch(str(tmp_path / "t.csv")).items())
    assert [item.token_steps for item in items[:3]] == [True, False, False]
    assert "logprobs='maybe' must be true or false" in str(items[3].error)
    assert items[4].token_steps
    (tmp_path / "t.csv").write_text('id,prompt,max_tokens,temperature,day\n7,x,5,0.5,Monday\n8,"[1]",,hot,\n')
    first, second = Batch(str(tmp_path / "t.csv")).items()
    assert (first.custom_id, first.prompt, first.max_new_tokens) == ("7", "x", 5)
    assert first.metadata == {"id": "7", "max_tokens": 5, "temperature": 0.5, "day": "Monday"}
    assert first.sampling == RequestSampling(0.5)
    assert second.error == "line 2: temperature='hot' must be a number of at least 0"


OPTIONS_OF_A_LINE = {
    "temperature": 0.9,
    "n": 2,
    "max_tokens": 5,
    "top_p": 0.5,
    "seed": 3,
    "stop": ["a"],
    "logprobs": True,
    "response_format": {"type": "json_object"},
}


@pytest.mark.parametrize("options", [{"column": "text"}, {"column": "prompt"}, {"prompt": "{text}"}])
def test_options_beside_a_prompt_of_another_name_are_obeyed(
    tmp_path: Path, options: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """All of them, as beside a field that is called `prompt`; what is not supported is refused by its name."""
    name = "text" if options != {"column": "prompt"} else "prompt"
    line = {name: "x", "day": "Monday"} | OPTIONS_OF_A_LINE
    named = [replace(item, metadata=None) for item in read(tmp_path, line, **options)]
    usual = read(tmp_path, {"prompt": "x"} | OPTIONS_OF_A_LINE)
    assert named == usual
    assert usual[0].sampling == RequestSampling(0.9, 0.5, None, 3)
    (item, _) = read(tmp_path, line, **options)
    assert item.metadata == {"day": "Monday"} | ({"text": "x"} if "prompt" in options else {})
    (bad,) = read(tmp_path, {name: "x", "presence_penalty": 1}, **options)
    assert bad.error == "line 1: presence_penalty is not supported; remove it"
    (bad,) = read(tmp_path, {name: " "}, **options)
    wanted = "has nothing but white space; give it a text, or leave the line out"
    if "prompt" in options:
        wanted = "is empty, and task.prompt asks for it; give it a value, or leave the line out"
    assert bad.error == f"line 1: {name} {wanted}"
    caplog.clear()
    with caplog.at_level("INFO", "lopa_dist"):
        read(tmp_path, {name: "x", "n": 2}, {name: "x", "temprature": 1}, **options)
    assert "options of a line: n (1 lines, the first with 2)" in caplog.messages[0]
    assert caplog.messages[1] == "the column temprature passes through; if it is an option, call it temperature"


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
        "line 2: task.prompt asks for {text}, but it has txt; name a column plainly, "
        "and write a brace of the text twice"
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
        "options of a line: max_tokens (1 lines, the first with 3); a field that is only to pass through needs another "
        "name",
        "WARNING: prompts that are the word NULL: 1; leave them out if it means nothing",
    ]


USER = {"role": "user", "content": "Hello"}


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([{"role": "user", "content": ""}], "messages[0] (user), the last one, is empty; give it a text, or leave"),
        (
            [{"role": "system", "content": "Be brief"}, {"role": "user", "content": " \n"}],
            "messages[1] (user), the last",
        ),
        ([{"role": "user", "content": []}], "messages[0] (user), the last one, is empty"),
        ([{"role": "user", "content": " "}, {"role": "assistant", "content": ""}], "messages have no text"),
        ([USER, {"role": "assistant", "content": None}], "messages[1] (assistant) has no content; give it a text"),
        ([USER, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, USER], ""),
        ([USER, {"role": "assistant", "content": ""}], ""),  # which is to be written
        ([USER, {"content": "x"}], "messages[1] has no role; give it one"),
        ([USER, "x"], "messages[1] must be {"),
        (None, "messages is null; give it a text, or leave the line out"),
    ],
)
def test_what_is_wrong_with_a_chat_is_said_of_its_message(tmp_path: Path, messages: Any, said: str) -> None:
    [item] = read(tmp_path, {"messages": messages})
    assert str(item.error or "").startswith(f"line 1: {said}" if said else "")
    assert bool(item.error) == bool(said)


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ({"id": "t1", "prompt": "x", "stream": True}, {}),  # refused for what is beside the prompt
        ({"id": "t1", "text": "x"}, {"column": "words"}),  # for what is not there
        ({"id": "t1", "prompt": 5}, {}),
    ],
)
def test_a_line_that_is_refused_keeps_its_name_and_its_fields(
    tmp_path: Path, line: dict[str, Any], options: dict[str, Any]
) -> None:
    [found, _] = read(tmp_path, line | {"level": 3}, {"prompt": "y", "words": "y"}, **options)
    assert found.error
    assert (found.custom_id, (found.metadata or {})["level"]) == ("t1", 3)
    assert found.prompt == (line["prompt"] if isinstance(line.get("prompt"), str) else None), "for the table of results"


def test_a_reference_without_a_value_is_called_that(tmp_path: Path) -> None:
    one, two = read(tmp_path, {"prompt": "x", "reference": None}, {"prompt": "x"}, score="exact")
    assert str(one.error).startswith("line 1: reference is empty, and task.score=exact judges by it")
    assert str(two.error).startswith("line 2: task.score=exact needs a field reference")
    [several] = read(tmp_path, {"prompt": "x", "reference": ["a"]}, score="exact")
    assert str(several.error).startswith("line 1: task.score=exact compares an answer with a text or a number")


@pytest.mark.parametrize(
    ("reference", "right", "wrong", "expected"),
    [
        (18, "18", "18.0", "18"),
        (18.0, "18", "19", "18"),  # a column of integers with a gap
        (18.0, "18.0", "1", "18"),
        (1e16, "10000000000000000", "1e16", "10000000000000000"),
        (0.5, "0.5", "0", "0.5"),
        (True, "true", "1", "true"),
        (False, "False", "0", "false"),
        (" yes ", "yes", "Yes", " yes "),
    ],
)
def test_how_a_reference_may_be_spelt(tmp_path: Path, reference: Any, right: str, wrong: str, expected: str) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text(json.dumps({"prompt": "x", "reference": reference}))
    task = Batch(str(file), score="exact")
    [item] = task.items()
    assert task.score(item, f" {right}\n") == Score(True, right, expected=expected)
    assert task.score(item, wrong) == Score(False, wrong, expected=expected)


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
        ({"prompt": "Say {text}"}, "task.prompt asks for {text}, but it has question; name a column plainly"),
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
