"""Whatever a batch line holds, it becomes a request or a rejection that says why."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lopa_dist.config import TaskConfig
from lopa_dist.engine.request import Request
from lopa_dist.jobs.prompts import Encoder, Rejection
from lopa_dist.tasks.batch_line import items_of
from lopa_dist.tasks.rows import parse
from lopa_dist.tasks.task import Item
from tests.jobs.test_run import config
from tests.tasks.test_batch import mutated_lines

QUESTION = [{"role": "user", "content": "How many coins ?"}]


@pytest.fixture(scope="module")
def encoder(embedded_model: Any, embedded_tokenizer: Any) -> Encoder:
    return Encoder(config(TaskConfig()), embedded_model.config, embedded_tokenizer)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(line=mutated_lines(), extra=st.dictionaries(st.text(max_size=4), st.integers() | st.none(), max_size=2))
def test_no_line_crashes_the_encoder(encoder: Encoder, line: bytes, extra: dict[str, Any]) -> None:
    row = parse(line.decode("utf-8", "surrogateescape"), 1)
    for item in items_of(row.value, 1) if row.value is not None else [Item("line-1", error=row.error)]:
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
