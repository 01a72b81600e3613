"""Answers that must be JSON: tried again, counted, and the same whatever runs beside them."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("jsonschema", reason="needs jsonschema: pip install 'lopa_dist[json]'")

from lopa_dist import LLM, SamplingParams
from lopa_dist.config import Config, ModelOptions, TaskConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.request import Request, request_key
from lopa_dist.jobs.commands.shards import merge_shards
from lopa_dist.jobs.run import tries
from lopa_dist.jobs.run.job import run
from lopa_dist.kernels.sampling import Sampling
from lopa_dist.parallel.launcher import World
from tests.jobs.run.test_job import config, lines

QUESTION = "<|user|> Olga has {} books . Olga buys 4 more .<|assistant|>"
PROMPT = QUESTION + " Originally Olga keeps {} overall . Next we get {} + 4 ="
SMALL = {"type": "json_schema", "json_schema": {"schema": {"type": "integer", "maximum": 20}}}
TRIES, TEMPERATURE = 3, 6.0


def asked(count: int = 24, **more: Any) -> list[dict[str, Any]]:
    """A token that is sometimes a number; every third line takes any."""
    return [
        {"prompt": PROMPT.format(n, n, n), "max_tokens": 1, "temperature": TEMPERATURE}
        | ({"response_format": SMALL} if n % 3 else {})
        | more
        for n in range(2, count + 2)
    ]


def job(folder: Path, given: list[dict[str, Any]], sequences: int = 8, **task: Any) -> tuple[Config, dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in given))
    made = config(TaskConfig("batch", limit=None, input=str(folder / "in.jsonl"), **task))
    made = replace(made, model=ModelOptions(chat_template="never"), engine=EngineConfig(max_sequences=sequences))
    return made, run(made, folder / "run", World("python"))


def test_ranks_agree_on_when_a_schema_is_too_slow() -> None:
    """One rank's check takes too long where another's finds the fault: both count that, so neither waits in vain."""
    met, told = threading.Barrier(2, timeout=20), [0, 0]

    def rank(number: int, end: str) -> list[str]:
        def least(value: int, device: Any) -> int:
            told[number] = value
            met.wait()
            agreed = min(told)
            met.wait()
            return agreed

        def ask(question: Any) -> str:
            if not end:
                raise tries.TooLong
            return end

        own = tries.Tries(cast(Any, None), [], cast(Any, None))
        own.engine = cast(Any, SimpleNamespace(lockstep=SimpleNamespace(least=least), device=None))
        own.checks = cast(Any, SimpleNamespace(ask=ask))
        return [own.failure_of_schema("{}", "x") for _ in range(tries.SLOW_CHECKS + 2)]

    with ThreadPoolExecutor(2) as pool:
        slow, faulty = pool.map(rank, (0, 1), ("", "no number"))
    assert slow == [tries.TOO_SLOW] * 5
    assert faulty == ["no number"] * 3 + [tries.TOO_SLOW] * 2


def test_tries_are_what_single_requests_give(tmp_path: Path) -> None:
    """Each try on an engine of its own, by the keys that follow from the request's."""
    made, report = job(tmp_path, asked())
    llm = LLM("embedded", "parallel.threads=1", "model.chat_template=never")
    engine = llm.builder.engine(made.decode, made.engine)
    found = lines(tmp_path / "run")
    total, thrown, invalid = 0, 0, 0
    for index, (line, given) in enumerate(zip(found, asked(), strict=True)):
        ids, key = llm.builder.tokenizer(given["prompt"]).input_ids, request_key(made.seed, line["custom_id"])
        sampling, forwards, failed = Sampling(made.decode.confidence, TEMPERATURE), 0, 0
        for count in range(1, TRIES + 1):
            own = key if count == 1 else request_key(key, f"try {count - 1}")
            [one] = engine.generate([Request(index, ids, 1, own, sampling)])
            forwards += one.forwards
            text = llm.builder.tokenizer.decode(one.tokens, skip_special_tokens=True)
            right = text.strip().isdigit() and int(text) <= 20
            if right or "response_format" not in given or count == TRIES:
                break
            failed += len(one.tokens)
        assert line["text"] == text
        assert line["usage"]["forwards"] == forwards
        if "response_format" in given:
            assert line["usage"]["tries"] == count
            assert line["usage"]["failed_tokens"] == failed
            assert (line["finish_reason"] == "invalid") == (not right)
            total, thrown, invalid = total + count, thrown + failed, invalid + (not right)
        else:
            assert "tries" not in line["usage"]
    assert report["tries"] == {"tries": total, "failed_tokens": thrown, "invalid": invalid, "answers": 16}
    assert report["forwards"] == sum(line["usage"]["forwards"] for line in found)
    assert 16 < total < 48, "some fail, and some do not"
    assert 0 < invalid < 16
    assert "it was cut at its limit of tokens: raise that" in next(
        line["error"] for line in found if line["finish_reason"] == "invalid"
    )


def test_the_same_in_other_batches_shards_and_from_python(tmp_path: Path) -> None:
    def texts(folder: Path) -> list[Any]:
        return [(line["text"], line["usage"], line["finish_reason"]) for line in lines(folder)]

    _, report = job(tmp_path / "a", asked())
    wanted = texts(tmp_path / "a" / "run")
    made, _ = job(tmp_path / "b", asked(), 2)
    assert texts(tmp_path / "b" / "run") == wanted
    for shard in range(2):
        share = replace(made, task=replace(made.task, shard=shard, shards=2))
        run(share, tmp_path / "array" / str(shard), World("python"))
    assert merge_shards(tmp_path / "array")["tries"] == report["tries"]
    assert texts(tmp_path / "array") == wanted
    llm = LLM("embedded", "parallel.threads=1", "model.chat_template=never")
    sampling = [
        SamplingParams(TEMPERATURE, max_tokens=1, response_format=line.get("response_format")) for line in asked()
    ]
    found = llm.generate([line["prompt"] for line in asked()], sampling=sampling, progress=False)
    assert [(one.text, one.finish_reason) for one in found] == [(text, reason) for text, _, reason in wanted]
    counted = [(usage.get("tries", 1), usage.get("failed_tokens", 0)) for _, usage, _ in wanted]
    assert [(one.tries, one.failed_tokens) for one in found] == counted


def test_tokens_of_thrown_away_answers_end_at_their_stop_string() -> None:
    """What was generated behind it depends on the drafts."""
    llm = LLM("causal", "parallel.threads=1")
    asked = SamplingParams(1.5, seed=5, stop=".", response_format={"type": "json_object"}, tries=2)
    question = "Sam has 12 candles . Sam gives 6 away . How many candles does Sam have now ?"
    for _ in range(2):
        found = [llm.generate([question], sampling=asked, drafts=drafts)[0] for drafts in (0, 1, 8)]
        assert len({(one.text, one.tries, one.failed_tokens) for one in found}) == 1
    assert found[0].tries == 2


def test_with_more_tries_an_attempt_generates_again_what_is_not_of_its_format_and_nothing_else(tmp_path: Path) -> None:
    def texts(folder: Path) -> list[Any]:
        return [(line["text"], line["usage"], line["finish_reason"]) for line in lines(folder)]

    _, few = job(tmp_path / "a", asked(), tries=2)
    _, more = job(tmp_path / "a", asked(), tries=5)
    _, fresh = job(tmp_path / "b", asked(), tries=5)
    assert 0 < fresh["tries"]["invalid"] < few["tries"]["invalid"]
    assert texts(tmp_path / "a" / "run") == texts(tmp_path / "b" / "run")
    assert more["tries"] == fresh["tries"]
    journal = tmp_path / "a" / "run" / "journal"
    assert sum('"id"' in line for line in (journal / "002-0.jsonl").open()) == few["tries"]["invalid"]
    _, again = job(tmp_path / "a", asked(), tries=3)
    assert again["tries"] == fresh["tries"], "with fewer tries nothing is generated again, or lost"
    assert '"id"' not in (journal / "003-0.jsonl").read_text()


def test_without_a_temperature_there_is_one_try(tmp_path: Path) -> None:
    """OpenAI lines get an error that says so; nothing is passed on as if it were right."""
    body = {"messages": [{"role": "user", "content": "Tom has 3 apples ."}], "response_format": {"type": "json_object"}}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    made = config(TaskConfig("batch", limit=None, input=str(tmp_path / "in.jsonl")))
    run(made, tmp_path / "run", World("python"))
    [found] = lines(tmp_path / "run")
    assert found["finish_reason"] == "invalid"
    assert found["usage"]["tries"] == 1
    assert "set a temperature" in found["error"]
    run(replace(made, task=replace(made.task, tries=9)), tmp_path / "run", World("python"))
    assert '"id"' not in (tmp_path / "run" / "journal" / "002-0.jsonl").read_text()
    [answer] = [json.loads(text) for text in (tmp_path / "run" / "batch_output.jsonl").read_text().splitlines()]
    assert answer["response"] is None
    assert "not JSON" in answer["error"]["message"]


def exponential() -> dict[str, Any]:
    """A schema that takes a day."""
    definitions: dict[str, Any] = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
    return {"$defs": definitions | {"d40": {}}, "$ref": "#/$defs/d0"}


def test_a_schema_that_takes_too_long_costs_its_own_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And they cost the job a few checks, however many there are."""
    monkeypatch.setattr(tries, "CHECK_S", 1.0)
    slow = {"type": "json_schema", "json_schema": {"schema": exponential()}}
    given = [{"prompt": "3", "max_tokens": 1}, {"prompt": PROMPT.format(3, 3, 3), "max_tokens": 1, "n": 8}]
    given[1] |= {"temperature": TEMPERATURE, "response_format": slow}
    job(tmp_path, given)
    found = lines(tmp_path / "run")
    assert found[0]["finish_reason"] in ("stop", "length")
    reasons = [line["error"] for line in found[1:] if line["finish_reason"] == "invalid"]
    assert reasons
    assert all("not JSON" in reason or "takes more than" in reason for reason in reasons)
    assert any("takes more than" in reason for reason in reasons)


@pytest.mark.parametrize(
    "schema",
    [{"$schema": ["x"]}, {"type": ["object", 3]}, {"properties": 5}, "deep"],
    ids=str,
)
def test_a_schema_that_is_none_is_that_line_s_error(tmp_path: Path, schema: Any) -> None:
    reason = "response_format is nested more than" if schema == "deep" else "json_schema"
    if schema == "deep":
        schema = {}
        for _ in range(400):
            schema = {"type": "object", "properties": {"a": schema}}
    wrong = {"type": "json_schema", "json_schema": {"schema": schema}}
    job(tmp_path, [{"prompt": "3", "max_tokens": 1}, {"prompt": "3", "response_format": wrong}])
    first, second = lines(tmp_path / "run")
    assert first["finish_reason"] in ("stop", "length")
    assert second["finish_reason"] == "error"
    assert reason in second["error"]
