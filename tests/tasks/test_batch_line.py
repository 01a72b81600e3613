"""A line of a batch: what it may say, and what is said of one that cannot run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lopa_dist.tasks.batch import Batch
from lopa_dist.tasks.batch_line import items_of
from lopa_dist.tasks.rows import parse
from lopa_dist.tasks.task import Item, Origin, RequestSampling, Score
from tests.tasks.batch_files import CHAT, openai, read


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
        assert parse(text, 1).error.startswith("not JSON")


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
