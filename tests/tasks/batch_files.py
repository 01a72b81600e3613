"""Batches of lines for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lopa_dist.tasks.batch import Batch
from lopa_dist.tasks.task import Item

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def openai(body: dict[str, Any], url: str = "/v1/chat/completions", **more: Any) -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": url, "body": {"model": "m", **body}, **more}


def read(tmp_path: Path, *lines: Any, **options: Any) -> list[Item]:
    file = tmp_path / "in.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return list(Batch(str(file), **options).items())
