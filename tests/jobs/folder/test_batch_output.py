"""OpenAI Batch lines through a whole job, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lopa_dist.config import TaskConfig
from lopa_dist.jobs.commands.trace import trace
from lopa_dist.jobs.folder.batch_output import choice
from lopa_dist.jobs.run.job import run
from lopa_dist.parallel.launcher import World
from lopa_dist.tasks.word_problems import HAS
from tests.jobs.run.test_job import config, lines

QUESTION = "Tom has 3 apples . Tom buys 4 more . How many apples does Tom have now ?"


def line(custom_id: str, url: str, **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "mine", **body}})


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("openai")
    chat = [{"role": "user", "content": QUESTION}]
    raw = [
        line("chat", "/v1/chat/completions", messages=chat, max_tokens=20, seed=5, logprobs=True, top_logprobs=0),
        line("plain", "/v1/completions", prompt=QUESTION, stop=list(HAS), max_tokens=30, logprobs=0),
        "",
        line("bad", "/v1/chat/completions", messages=chat, temperature=-1),
        "{",
        json.dumps({"prompt": QUESTION, "max_tokens": 8}),
        line("three", "/v1/chat/completions", messages=chat, n=3, max_tokens=16, seed=5, temperature=1.0),
        line("three again", "/v1/chat/completions", messages=chat, n=3, max_tokens=16, seed=5),
        json.dumps({"messages": chat, "max_tokens": 8}),
        line("too long", "/v1/completions", prompt="x " * 600),
    ]
    (folder / "in.jsonl").write_text("\n".join(raw))
    run(config(TaskConfig("batch", None, str(folder / "in.jsonl")), temperature=1.0), folder, World("python"))
    return folder


def output(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "batch_output.jsonl").read_text().splitlines()]


def test_one_object_a_line_in_order(job: Path) -> None:
    found = output(job)
    ids = ["chat", "plain", "bad", "line-5", "line-6", "three", "three again", "line-9", "too long"]
    assert [o["custom_id"] for o in found] == ids
    assert [o["error"] is None for o in found] == [True, True, False, False, True, True, True, True, False]
    assert len({o["id"] for o in found}) == len(found)
    for o in found:
        assert (o["response"] is None) == (o["error"] is not None)
        assert set(o) == {"id", "custom_id", "response", "error"}
    assert found[2]["error"] == {
        "code": "invalid_request", "message": "line 4: temperature=-1 must be a number of at least 0",
    }  # fmt: skip
    assert "positions" in found[8]["error"]["message"]
    kinds = [found[i]["response"]["body"]["object"] for i in (4, 7)]
    assert kinds == ["text_completion", "chat.completion"]


def test_bodies(job: Path) -> None:
    found, results = output(job), lines(job)
    chat, plain = found[0]["response"]["body"], found[1]["response"]["body"]
    assert found[0]["response"]["status_code"] == 200
    assert (chat["object"], plain["object"], chat["model"]) == ("chat.completion", "text_completion", "mine")
    assert chat["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": results[0]["text"]},
            "logprobs": chat["choices"][0]["logprobs"],
            "finish_reason": results[0]["finish_reason"],
        }
    ]
    assert plain["choices"][0]["text"] == results[1]["text"]
    usage = results[0]["usage"]
    assert chat["usage"]["prompt_tokens"] == usage["prompt_tokens"]
    assert chat["usage"]["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_probabilities_are_told_where_a_line_asks(job: Path) -> None:
    found, results = output(job), lines(job)
    chat, plain, other = (found[i]["response"]["body"]["choices"][0] for i in (0, 1, 5))
    steps = results[0]["token_steps"]
    assert len(steps) == len(results[0]["token_ids"])
    assert [(one["token"], one["logprob"]) for one in chat["logprobs"]["content"]] == [
        (one["token"], one["logprob"]) for one in steps
    ]
    text = b"".join(bytes(one["bytes"]) for one in chat["logprobs"]["content"]).decode()
    assert text == chat["message"]["content"]
    told = plain["logprobs"]
    assert "".join(told["tokens"]).startswith(plain["text"])
    assert len(told["tokens"]) == len(results[1]["token_ids"])  # no more than the text needs
    for token, offset in zip(told["tokens"][:-1], told["text_offset"], strict=False):
        assert plain["text"][offset:].startswith(token)
    assert all(logprob <= 0 for logprob in told["token_logprobs"])
    assert other["logprobs"] is None
    assert "token_steps" not in results[6]


def test_stop_strings_end_the_text(job: Path) -> None:
    result = lines(job)[1]
    assert result["text"].strip()
    assert not any(verb in result["text"] for verb in HAS)  # every answer's first sentence has one
    assert result["finish_reason"] == "stop"
    assert result["usage"]["completion_tokens"] == len(result["token_ids"]) < 30


def test_a_cut_text_can_be_traced(job: Path) -> None:
    assert trace(job, "plain").same


def test_samples_are_choices_and_a_seed_repeats_them(job: Path) -> None:
    found = output(job)
    three, again = found[5]["response"]["body"], found[6]["response"]["body"]
    texts = [choice["message"]["content"] for choice in three["choices"]]
    assert [choice["index"] for choice in three["choices"]] == [0, 1, 2]
    assert len(set(texts)) > 1
    assert texts == [choice["message"]["content"] for choice in again["choices"]]
    mine = [line for line in lines(job) if line["custom_id"].startswith("three#")]
    assert [line["custom_id"] for line in mine] == ["three#0", "three#1", "three#2"]
    assert three["usage"]["completion_tokens"] == sum(line["usage"]["completion_tokens"] for line in mine)


def test_sampling_of_a_line_s_own(tmp_path: Path) -> None:
    """Greedy lines in a sampling job are those of a greedy job, and the other way round."""
    raw = [
        {"custom_id": f"{kind}{i}", "prompt": QUESTION, "max_tokens": 24, "seed": i, "temperature": t}
        for kind, t in (("greedy", 0), ("hot", 1.0), ("plain", None))
        for i in range(3)
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(r) + "\n" for r in raw))
    texts = {}
    for temperature in (0.0, 1.0):
        folder = tmp_path / str(temperature)
        folder.mkdir()
        run(
            config(TaskConfig("batch", None, str(tmp_path / "in.jsonl")), temperature=temperature),
            folder,
            World("python"),
        )
        texts[temperature] = {line["custom_id"]: line["text"] for line in lines(folder)}
        assert not (folder / "batch_output.jsonl").exists()
    cold, hot = texts[0.0], texts[1.0]
    for i in range(3):
        assert cold[f"greedy{i}"] == hot[f"greedy{i}"] == cold[f"plain{i}"]
        assert cold[f"hot{i}"] == hot[f"hot{i}"] == hot[f"plain{i}"]
    assert len({cold["greedy0"], *(cold[f"hot{i}"] for i in range(3))}) > 1


def test_answers_of_an_earlier_input_do_not_stay(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    job = config(TaskConfig("batch", None, str(file)), max_new_tokens=16)
    file.write_text(line("a", "/v1/completions", prompt=QUESTION))
    run(job, tmp_path, World("python"))
    assert [answer["custom_id"] for answer in output(tmp_path)] == ["a"]
    file.write_text(json.dumps({"prompt": QUESTION}))
    run(job, tmp_path, World("python"))
    assert not (tmp_path / "batch_output.jsonl").exists()


def test_reasoning_stands_beside_a_chat_s_answer() -> None:
    result = {"text": "4", "reasoning": "2 + 2", "finish_reason": "stop"}
    assert choice(result, 0, True)["message"] == {"role": "assistant", "content": "4", "reasoning": "2 + 2"}
    assert choice(result, 0, False)["text"] == "4"
