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
        line |= {f"correct_{rule}": right for rule, right in score.also.items()}
        line |= {"reason": score.reason} if score.reason else {}
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


def clear(folder: Path) -> None:
    """Remove what an earlier run into the same folder left."""
    for name in (
        "results.jsonl",
        "results.*.jsonl",
        "figures.*.json",
        "report.json",
        "report.md",
        "batch_output.jsonl",
    ):
        for file in folder.glob(name):
            file.unlink()


def merge_results(folder: Path, replicas: int, expected: int) -> None:
    """Put all lines into `results.jsonl` in input order, atomically, and remove the replicas' files.

    Raises:
        RuntimeError: there are not as many lines as requests (a shared folder that is not, say).
    """
    names = [f"results.{r}.jsonl" for r in range(replicas)] if replicas > 1 else ["results.jsonl"]
    parts = [folder / name for name in names]
    # not splitlines(): texts may hold other characters that it takes for line ends
    lines = [line for part in parts for line in part.read_text(encoding="utf-8").split("\n") if line]
    if len(lines) != expected:
        raise RuntimeError(
            f"{len(lines)} result lines of {expected} requests in {folder}; is it one folder for all ranks?"
        )
    lines.sort(key=lambda line: int(json.loads(line)["index"]))
    ordered = folder / "results.partial"
    with ordered.open("w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())
    ordered.replace(folder / "results.jsonl")
    for part in parts if replicas > 1 else ():
        part.unlink()
