"""`batch_output.jsonl`: what OpenAI's Batch API would have answered, where the input was written for it."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from lopa_dist.tasks.task import Item, Origin

NAME = "batch_output.jsonl"


def write_batch_output(folder: Path, items: Sequence[Item], model: str) -> None:
    """Write it beside a complete `results.jsonl`, one object an input line, if any line is an OpenAI Batch line."""
    if not any(item.origin and item.origin.form != "simple" for item in items):
        return
    created = int(time.time())
    partial = folder / "batch_output.partial"
    with partial.open("w", encoding="utf-8") as file:
        for origin, lines in grouped(folder, items):
            chat = origin.form == "chat" or items[lines[0]["index"]].messages is not None
            file.write(json.dumps(response(origin, lines, chat, model, created), ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(folder / NAME)


def grouped(folder: Path, items: Sequence[Item]) -> Iterator[tuple[Origin, list[dict[str, Any]]]]:
    """The result lines of every input line."""

    def origin(line: dict[str, Any]) -> Origin:
        item = items[line["index"]]
        return item.origin or Origin(line["index"] + 1, item.custom_id)

    with (folder / "results.jsonl").open(encoding="utf-8", newline="\n") as file:
        results = (json.loads(line) for line in file)
        for _, group in groupby(results, lambda line: origin(line).line):
            lines = list(group)
            yield origin(lines[0]), lines


def response(origin: Origin, lines: Sequence[dict[str, Any]], chat: bool, model: str, created: int) -> dict[str, Any]:
    """One line's answer: its samples as choices, or its first error."""
    unique = hashlib.sha256(f"{origin.line}/{origin.custom_id}".encode()).hexdigest()[:24]
    answer: dict[str, Any] = {"id": f"batch_req_{unique}", "custom_id": origin.custom_id}
    failed = next((line["error"] for line in lines if line["finish_reason"] == "error"), None)
    if failed is not None:
        return answer | {"response": None, "error": {"code": "invalid_request", "message": failed}}
    prompt, completion = lines[0]["usage"]["prompt_tokens"], sum(line["usage"]["completion_tokens"] for line in lines)
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{unique}",
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": origin.model or model,
        "choices": [choice(line, number, chat) for number, line in enumerate(lines)],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        },
    }
    return answer | {"response": {"status_code": 200, "request_id": unique, "body": body}, "error": None}


def choice(line: dict[str, Any], number: int, chat: bool) -> dict[str, Any]:
    """One sample."""
    content = {"message": {"role": "assistant", "content": line["text"]}} if chat else {"text": line["text"]}
    return {"index": number, **content, "logprobs": None, "finish_reason": line["finish_reason"]}
