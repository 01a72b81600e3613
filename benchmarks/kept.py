"""What a benchmark has measured, kept by the model's weights, so that only what is missing is run."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


class Kept:
    """Results in a JSON file; those of other weights than `folder` has are dropped."""

    def __init__(self, file: Path, folder: Path) -> None:
        self.file = file
        weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()[:16]
        kept = json.loads(file.read_text()) if file.exists() else {}
        self.content: dict[str, Any] = kept if kept.get("model") == weights else {"model": weights, "results": {}}

    @property
    def results(self) -> dict[str, Any]:
        """By what identifies each of them."""
        found: dict[str, Any] = self.content["results"]
        return found

    def put(self, key: str, result: dict[str, Any]) -> None:
        """Add a result; it is in the file at once."""
        self.results[key] = result
        self.file.parent.mkdir(exist_ok=True)
        self.file.write_text(json.dumps(self.content, indent=1) + "\n")
