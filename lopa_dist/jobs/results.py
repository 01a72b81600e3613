"""`results.jsonl`: a line per request, durable the moment it is written, in input order once the job is complete."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from lopa_dist.engine.request import Generation
from lopa_dist.tasks.task import Item, Score


def generation_line(
    item: Item, generation: Generation, text: str, score: Score | None, token_ids: bool
) -> dict[str, Any]:
    """The line of a finished request (DESIGN section 4)."""
    request, count = generation.request, len(generation.tokens)
    line: dict[str, Any] = {
        "custom_id": item.custom_id,
        "index": request.index,
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
    return line


def error_line(item: Item, index: int, message: str) -> dict[str, Any]:
    """The line of a request that could not run."""
    return {
        "custom_id": item.custom_id,
        "index": index,
        "text": "",
        "finish_reason": "error",
        "error": message,
    }


class ResultWriter:
    """Appends lines as they come: to `results.jsonl`, or to a file of its replica's when there are several."""

    def __init__(self, folder: Path, replica: int | None = None) -> None:
        name = "results.jsonl" if replica is None else f"results.{replica}.jsonl"
        self.file = (folder / name).open("w", encoding="utf-8")

    def write(self, line: dict[str, Any]) -> None:
        """Append one line and make sure it is on disk."""
        self.file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self.file.flush()
        os.fsync(self.file.fileno())

    def close(self) -> None:
        """No more lines."""
        self.file.close()


def clear_parts(folder: Path) -> None:
    """Remove replicas' files that an earlier, broken run left."""
    for part in folder.glob("results.*.jsonl"):
        part.unlink()


def merge_results(folder: Path) -> None:
    """Put all lines into `results.jsonl` in input order, atomically, and remove the replicas' files."""
    parts = sorted(folder.glob("results.*.jsonl")) or [folder / "results.jsonl"]
    lines = [line for part in parts for line in part.read_text(encoding="utf-8").splitlines()]
    lines.sort(key=lambda line: int(json.loads(line)["index"]))
    ordered = folder / "results.partial"
    with ordered.open("w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())
    ordered.replace(folder / "results.jsonl")
    for part in parts:
        if part.name != "results.jsonl":
            part.unlink()
