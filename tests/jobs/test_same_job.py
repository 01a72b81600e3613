"""What makes a job, or a request, the same one: everything that its texts and verdicts depend on."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from lopa_dist.composing import composed
from lopa_dist.config import Config, ModelOptions, TaskConfig
from lopa_dist.jobs.commands.shards import merge_shards, settings
from lopa_dist.jobs.run.attempt import journal_settings
from lopa_dist.jobs.run.job import run
from lopa_dist.jobs.run.job_input import request_id
from lopa_dist.jobs.run.prompts import Encoder
from lopa_dist.models.config_file import read_config
from lopa_dist.models.files import EMBEDDED, revision
from lopa_dist.parallel.launcher import World
from lopa_dist.setting_keys import keys_of
from lopa_dist.tasks.batch_line import items_of
from lopa_dist.tasks.hashed_items import HashedItems
from lopa_dist.tasks.response_format import ResponseFormat
from lopa_dist.tasks.task import Continuation, Item, Origin, RequestSampling
from tests.jobs.run.test_job import config

ITEM = Item("a", prompt="Ann has 3 books .", reference="3", origin=Origin(1, "a"))
OTHERS: dict[str, Any] = {  # of each field of an item, another value
    "custom_id": "b",
    "prompt": "Ann has 4 books .",
    "messages": [{"role": "user", "content": "?"}],
    "max_new_tokens": 7,
    "error": "bad",
    "prefix": "Ann",
    "reference": "4",
    "answer_prefix": "So",
    "stop": ("\n",),
    "sampling": RequestSampling(temperature=0.5),
    "origin": Origin(1, "a", sample=1),
    "metadata": {"day": "Monday"},
    "token_steps": True,
    "suffix": " in all",
    "response_format": ResponseFormat(),
    "continuations": (Continuation(" 3", " 3"),),
}


def hashed(item: Item) -> str:
    items = HashedItems([item])
    assert list(items) == [item]
    return items.digest()


def test_an_input_is_the_same_in_whatever_words_a_version_says_what_is_wrong_with_it() -> None:
    wrong = HashedItems([replace(ITEM, error="prompt must be a text")]), HashedItems([replace(ITEM, error="no prompt")])
    assert all(list(items) for items in wrong)
    assert wrong[0].digest() == wrong[1].digest()
    assert wrong[0].prompts() == wrong[1].prompts()


@pytest.mark.parametrize("field", [f.name for f in fields(Item)])
def test_an_input_is_another_where_any_field_of_an_item_is(field: str) -> None:
    assert hashed(replace(ITEM, **{field: OTHERS[field]})) != hashed(ITEM)


LINE = {"custom_id": "a", "prompt": "Ann has 3 books .", "temperature": 0.5, "seed": 4, "n": 2}
OTHER_FIELDS: dict[str, Any] = {
    "custom_id": "b",
    "prompt": "Ann has 4 books .",
    "temperature": 0.6,
    "seed": 5,
    "n": 3,
    "top_p": 0.9,
    "top_k": 3,
    "max_tokens": 5,
    "stop": "x",
}


@pytest.mark.parametrize("field", OTHER_FIELDS)
def test_a_changed_line_is_another_input_and_other_requests(
    embedded_tokenizer: PreTrainedTokenizerFast, field: str
) -> None:
    shape = read_config(EMBEDDED)
    made = config(TaskConfig("batch", None, "x"))
    encoder = Encoder(made, shape, embedded_tokenizer)

    def of(line: dict[str, Any]) -> tuple[list[str | None], str]:
        items = items_of(line, 1)
        assert not any(item.error for item in items), items
        whole = HashedItems(items)
        return [request_id(item, encoder.encode(0, item)) for item in whole], whole.digest()

    ids, digest = of(LINE)
    others, other = of(LINE | {field: OTHER_FIELDS[field]})
    assert other != digest
    assert others != ids
    assert len({*ids}) == len(ids) == 2


# settings without an effect on texts and verdicts, or whose effect is in other ones' values or in the requests
NO_EFFECT = ("logging.", "job.", "learn.", "parallel.", "task.shard", "task.shards", "task.limit", "task.output")
DRAFTS = {"decode.draft_from", "model.lora_rows"}  # which change no text (lora_rows: without an adapter, nothing)
RESOLVED = {"model.path", "model.lora", "model.dtype", "model.device", "model.pattern"}  # as weights, dtype, decode
REQUESTS = {
    "task.input", "task.harness", "task.column", "task.fewshot", "task.fewshot_input", "task.fewshot_as_multiturn",
    "task.split", "task.problem_seed", "task.samples", "task.tries",
    "task.prompt", "task.id", "task.truncate", "task.response_format",
}  # fmt: skip
SCHEDULE = {
    "engine.max_sequences", "engine.max_rows", "engine.kv_tokens", "engine.attention", "engine.graphs",
    "engine.prefill_chunk", "engine.prefix_cache", "engine.reproducible", "engine.kernels",
}  # fmt: skip
ELSEWHERE = RESOLVED | REQUESTS | SCHEDULE | DRAFTS
KEYS = [
    key
    for key in [key for key, *_ in keys_of()]
    if (not key.startswith(NO_EFFECT) and key not in ELSEWHERE and "." in key) or key == "seed"
]


def changed(value: Any, choices: tuple[Any, ...]) -> Any:
    """Another value of the same kind."""
    if choices:
        return next(choice for choice in choices if choice != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return 3


@pytest.mark.parametrize("key", KEYS)  # a job that goes on takes another task.score, and judges again
def test_every_other_key_refuses_a_resume_and_a_merge(key: str) -> None:
    made = composed(["task=humaneval", "task.allow_code_execution=true", "model.dtype=fp32"])
    builder: Any = SimpleNamespace(revision="r", adapter_revision=None, dtype="fp32")
    section, _, name = key.rpartition(".")
    holder = getattr(made, section) if section else made
    before = journal_settings(made, builder), reported(made, builder)
    metadata = {f.name: f.metadata for f in fields(holder)}[name]
    object.__setattr__(holder, name, changed(getattr(holder, name), metadata.get("choices", ())))
    if key == "task.allow_code_execution":  # without it there is no time limit in the settings either
        assert not holder.allow_code_execution
    assert journal_settings(made, builder) != before[0]
    assert settings(reported(made, builder)) != settings(before[1])


def reported(made: Config, builder: Any) -> dict[str, Any]:
    sections = {section: asdict(getattr(made, section)) for section in ("model", "task", "decode", "engine")}
    return {**sections, "seed": made.seed, "weights": journal_settings(made, builder)["model"]}


def test_shards_of_other_weights_at_one_path_do_not_merge(tmp_path: Path) -> None:
    model, source = tmp_path / "model", tmp_path / "in.jsonl"
    shutil.copytree(EMBEDDED, model)
    source.write_text("".join(json.dumps({"prompt": "Ann has 3 books ."}) + "\n" for _ in range(2)))
    for shard in range(2):
        made = config(TaskConfig("batch", None, str(source), shard=shard, shards=2), max_new_tokens=16)
        folder = tmp_path / "sh" / str(shard)
        folder.mkdir(parents=True)
        run(replace(made, model=ModelOptions(path=str(model), pattern="d2f")), folder, World("python"))
        (model / "tokenizer_config.json").write_text((model / "tokenizer_config.json").read_text() + "\n")
    with pytest.raises(ValueError, match=r"other settings than .*: weights\.revision was '[\w-]+', is '[\w-]+'"):
        merge_shards(tmp_path / "sh")
    assert revision(model) != revision(EMBEDDED)
