"""`batch_output.jsonl`: what OpenAI's Batch API would have answered, if the input was written for it.

A shard of an input (task.shards) may have only some of a line's samples: it stores what an answer must tell of its
lines, and `lopa-dist merge` writes the answers.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

from lopa_dist.atomic import write_lines
from lopa_dist.encodable import json_line
from lopa_dist.jobs.folder.open_files import lines_of
from lopa_dist.tasks.task import Item

NAME = "batch_output.jsonl"
LINES = "batch_lines.jsonl"


@dataclass(frozen=True, slots=True)
class Line:
    """What an answer must tell of the input line that a request came from."""

    number: int
    custom_id: str  # as the user wrote it
    openai: bool  # whether it is an OpenAI Batch line
    chat: bool  # whether it is to be answered with a message
    model: str | None  # what the line calls the model


def line_of(item: Item) -> Line:
    """Return the line that an item of the task `batch` was made from."""
    origin = item.origin
    assert origin is not None
    chat = origin.form == "chat" or item.messages is not None
    return Line(origin.line, origin.custom_id, origin.form != "simple", chat, origin.model)


def write_batch_lines(folder: Path, lines: Iterable[Line]) -> None:
    """Write the lines of a shard's requests into its run folder."""
    write_lines(folder / LINES, (json_line(asdict(line)) for line in lines))


def read_batch_lines(folder: Path) -> Iterator[Line]:
    """Yield what `write_batch_lines` wrote; nothing if it wrote nothing."""
    if (folder / LINES).exists():
        yield from (Line(**json.loads(line)) for line in lines_of(folder / LINES))


def write_batch_output(folder: Path, lines: Callable[[], Iterable[Line]], model: str) -> None:
    """Write `batch_output.jsonl` for complete results, one object per input line, if any is an OpenAI Batch line.

    Args:
        folder: of the run.
        lines: returns the line of every result, in order.
        model: what answers call the model if their line does not name it.
    """
    if not any(line.openai for line in lines()):
        (folder / NAME).unlink(missing_ok=True)  # of an earlier input
        return
    created = int(time.time())
    with (folder / "results.jsonl").open(encoding="utf-8", newline="\n") as file:
        pairs = zip(lines(), map(json.loads, file), strict=True)
        answers = (zip(*group, strict=True) for _, group in groupby(pairs, lambda pair: pair[0].number))
        write_lines(folder / NAME, (json_line(response(of[0], results, model, created)) for of, results in answers))


def response(line: Line, results: Sequence[dict[str, Any]], model: str, created: int) -> dict[str, Any]:
    """Return one line's answer: its samples as choices, or its first error."""
    unique = hashlib.sha256(f"{line.number}/{line.custom_id}".encode()).hexdigest()[:24]
    answer: dict[str, Any] = {"id": f"batch_req_{unique}", "custom_id": line.custom_id}
    failed = next((result["error"] for result in results if result["finish_reason"] in ("error", "invalid")), None)
    if failed is not None:
        return answer | {"response": None, "error": {"code": "invalid_request", "message": failed}}
    prompt = results[0]["usage"]["prompt_tokens"]
    completion = sum(result["usage"]["completion_tokens"] for result in results)
    body = {
        "id": f"{'chatcmpl' if line.chat else 'cmpl'}-{unique}",
        "object": "chat.completion" if line.chat else "text_completion",
        "created": created,
        "model": line.model or model,
        "choices": [choice(result, number, line.chat) for number, result in enumerate(results)],
        "usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion},
    }
    return answer | {"response": {"status_code": 200, "request_id": unique, "body": body}, "error": None}


def choice(result: dict[str, Any], number: int, chat: bool) -> dict[str, Any]:
    """Return one sample as a choice of its line's answer."""
    reasoning = {"reasoning": result["reasoning"]} if "reasoning" in result else {}
    message = {"role": "assistant", "content": result["text"], **reasoning}
    content = {"message": message} if chat else {"text": result["text"]}
    logprobs = (chat_logprobs if chat else completion_logprobs)(result) if "token_steps" in result else None
    return {"index": number, **content, "logprobs": logprobs, "finish_reason": result["finish_reason"]}


def chat_logprobs(result: dict[str, Any]) -> dict[str, Any]:
    """Return the tokens' log probabilities as a chat's answer has them; parts of characters get no bytes."""

    def entry(token: str, logprob: float) -> dict[str, Any]:
        known = token and "\ufffd" not in token
        return {
            "token": token,
            "logprob": logprob,
            "bytes": list(token.encode()) if known else None,
            "top_logprobs": [],
        }

    return {"content": [entry(step["token"], step["logprob"]) for step in result["token_steps"]], "refusal": None}


def completion_logprobs(result: dict[str, Any]) -> dict[str, Any]:
    """Return the tokens' log probabilities as a completion has them."""
    tokens = [step["token"] for step in result["token_steps"]]
    return {
        "tokens": tokens,
        "token_logprobs": [step["logprob"] for step in result["token_steps"]],
        "top_logprobs": None,
        "text_offset": list(accumulate(map(len, tokens), initial=0))[:-1],
    }
