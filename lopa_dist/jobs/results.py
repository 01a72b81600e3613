"""The lines of `results.jsonl`, one a request; `merge` adds their place in the input."""

from __future__ import annotations

from typing import Any

from lopa_dist.engine.request import Generation
from lopa_dist.tasks.task import Item, Score


def generation_line(
    item: Item, generation: Generation, text: str, score: Score | None, token_ids: bool
) -> dict[str, Any]:
    """The line of a finished request."""
    request, count = generation.request, len(generation.tokens)
    line: dict[str, Any] = {
        "custom_id": item.custom_id,
        "text": text,
        "finish_reason": generation.finish_reason,
        "usage": {
            "prompt_tokens": len(request.prompt),
            "completion_tokens": count,
            "forwards": generation.forwards,
        },
        "tpf": round(count / generation.forwards, 4),
        "latency_s": round(generation.seconds, 6),
    }
    if token_ids:
        line["token_ids"] = generation.tokens
    if score is not None:
        line |= {"correct": score.correct, "extracted": score.extracted}
        line |= {f"correct_{rule}": right for rule, right in score.also.items()}
        line |= {"reason": score.reason} if score.reason else {}
    return line


def error_line(item: Item, message: str) -> dict[str, Any]:
    """The line of a request that could not run."""
    return {
        "custom_id": item.custom_id,
        "text": "",
        "finish_reason": "error",
        "error": message,
    }
