"""Whatever a batch line holds, it becomes a request or a rejection that says why."""

from __future__ import annotations

import gzip
import json
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lopa_dist.config import TaskConfig
from lopa_dist.encodable import json_line
from lopa_dist.engine.request import Request
from lopa_dist.jobs.run.answers import error_line
from lopa_dist.jobs.run.job_input import request_id
from lopa_dist.jobs.run.prompts import Encoder, Rejection
from lopa_dist.tasks.batch import Batch
from lopa_dist.tasks.batch_line import LABELS, NEUTRAL, SAMPLING, URLS, bad_line, items_of, read_sampling
from lopa_dist.tasks.rows import parse, rows
from lopa_dist.tasks.task import Item
from tests.jobs.run.test_job import config
from tests.tasks.test_batch_line import mutated_lines

QUESTION = [{"role": "user", "content": "How many coins ?"}]


@pytest.fixture(scope="module")
def encoder(embedded_model: Any, embedded_tokenizer: Any) -> Encoder:
    return Encoder(config(TaskConfig()), embedded_model.config, embedded_tokenizer)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(line=mutated_lines(), extra=st.dictionaries(st.text(max_size=4), st.integers() | st.none(), max_size=2))
def test_no_line_crashes_the_encoder(encoder: Encoder, line: bytes, extra: dict[str, Any]) -> None:
    row = parse(line.decode("utf-8", "surrogateescape"), 1)
    for item in items_of(row.value, 1) if row.value is not None else [bad_line(1, str(row.error))]:
        for message in item.messages or []:
            message.update({key: value for key, value in extra.items() if key not in message})
        encoded = encoder.encode(0, encoder.choose(item))
        assert isinstance(encoded, Request | Rejection)
        if isinstance(encoded, Request):
            assert item.error is None
            assert encoded.prompt
            assert encoded.max_new_tokens == (item.max_new_tokens or 64)
        else:
            assert encoded.message.startswith("line 1: ")


NUMBERS = (
    st.integers(-(10**400), 10**400) | st.floats() | st.sampled_from([10**308, 10**309, -1, 0, 1, 0.5, 2**63, 1e308])
)
TEXTS = st.text(st.characters(codec=None, exclude_categories=()), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
CONTENT = TEXTS | st.lists(
    st.fixed_dictionaries({"type": st.just("text") | VALUES, "text": TEXTS | VALUES}), max_size=2
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]) | VALUES, "content": CONTENT})
    | st.dictionaries(st.sampled_from(["role", "content", "name", "tool_calls"]), VALUES),
    max_size=3,
)
FIELDS = {
    "custom_id": TEXTS | VALUES,
    "prompt": TEXTS | VALUES,
    "messages": MESSAGES | VALUES,
    "stop": TEXTS | st.lists(TEXTS, max_size=3) | VALUES,
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "seed", "n"), VALUES),
}
MORE = dict.fromkeys((*NEUTRAL, *LABELS, "model", "other"), VALUES)
REQUEST = st.fixed_dictionaries({}, optional=FIELDS)
LINES = (
    REQUEST
    | st.fixed_dictionaries({"prompt": TEXTS}, optional={key: FIELDS[key] for key in (*SAMPLING, "stop", "n")})
    | st.fixed_dictionaries(
        {"body": st.fixed_dictionaries({}, optional=FIELDS | MORE) | VALUES},
        optional={"custom_id": VALUES, "method": st.just("POST") | VALUES, "url": st.sampled_from([*URLS]) | VALUES},
    )
    | VALUES
)
EXAMPLES = int(os.environ.get("LOPA_FUZZ", "300"))


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(value=LINES)
def test_no_value_of_json_ends_a_job(encoder: Encoder, value: Any) -> None:
    """Lines by their grammar: a field of any kind in any place, written as JSON has it."""
    text = json.dumps(value)
    row = parse(text, 1)
    items = items_of(row.value, 1) if row.value is not None else [bad_line(1, str(row.error))]
    assert items
    some = [encoder.choose(item) for item in items]
    encoded = encoder.encode_all(0, some)
    assert [one.index for one in encoded] == list(range(len(items)))
    for item, one in zip(some, encoded, strict=True):
        assert isinstance(one, Request | Rejection)
        request_id(item, one)
        message = one.message if isinstance(one, Rejection) else ""
        assert json_line(error_line(item, message)).encode()


@settings(max_examples=EXAMPLES // 3, deadline=None, suppress_health_check=list(HealthCheck))
@given(lines=st.lists(LINES, max_size=4), damage=st.integers(0, 3), data=st.data())
def test_a_file_of_any_kind_is_read_or_refused_in_a_line(
    tmp_path_factory: pytest.TempPathFactory, lines: list[Any], damage: int, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(["a.jsonl", "a.json", "a.jsonl.gz", "a.json.gz", "a.csv", "a.parquet"]))
    raw = bytearray("\n".join(map(json.dumps, lines)).encode())
    packed = bytearray(gzip.compress(bytes(raw))) if name.endswith(".gz") else raw
    for _ in range(damage if packed else 0):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    file = tmp_path_factory.mktemp("fuzz") / name
    file.write_bytes(bytes(packed[: data.draw(st.integers(0, len(packed)))]) if damage == 3 else bytes(packed))
    refusal = ""
    found: list[Item] = []
    try:
        found = [item for row in rows(str(file)) for item in Batch(str(file)).read(row)]
    except ValueError as error:
        refusal = str(error)
    assert refusal.startswith("task.input=") or not refusal
    assert "\n" not in refusal
    assert all(item.error or item.prompt or item.messages for item in found)


@pytest.mark.parametrize("field", ["temperature", "top_p"])
def test_a_number_too_large_is_that_line_s_error(field: str) -> None:
    [item] = items_of({"prompt": "a", field: 10**400}, 3)
    assert str(item.error).startswith(f"line 3: {field}=1000")
    assert len(str(item.error)) < 200
    assert read_sampling({field: 1}) is not None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt": "x", "max_tokens": 65}, "max_tokens=65 is above decode.max_new_tokens=64"),
        ({"prompt": "x " * 600}, "the prompt has"),
        ({"prompt": "a <|mask|>"}, "the prompt contains the mask token"),
    ],
)
def test_what_the_model_refuses_names_the_line(encoder: Encoder, fields: dict[str, Any], reason: str) -> None:
    """Once a sample: an index in the input is the same for every model."""
    found = encoder.encode_all(4, items_of({**fields, "n": 3}, 12))
    assert [one.index for one in found] == [4, 5, 6]
    assert all(isinstance(one, Rejection) and one.message.startswith(f"line 12: {reason}") for one in found)


def test_seeds(encoder: Encoder) -> None:
    """A seed of the line's own rules alone; without one, the job's seed and the id do."""

    def key(**fields: Any) -> list[int]:
        return [encoder.encode(0, item).key for item in items_of({"messages": QUESTION, **fields}, 1)]

    assert key(custom_id="a", seed=3) == key(custom_id="b", seed=3)
    assert key(custom_id="a", seed=3) != key(custom_id="a", seed=4)
    assert key(custom_id="a") != key(custom_id="b")
    assert key(seed=3, n=2)[0] == key(seed=3)[0]
    assert len(set(key(seed=3, n=3) + key(n=3))) == 6
