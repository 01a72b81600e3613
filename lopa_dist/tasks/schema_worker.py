"""The child process that checks texts against JSON schemas, since a check may hang: some patterns would take a day."""

from __future__ import annotations

from typing import Any

from lopa_dist.tasks.response_format import ResponseFormat
from lopa_dist.tasks.worker import serve


def failure(question: dict[str, Any]) -> str:
    """Return what `ResponseFormat.failure` says of the text in `question`."""
    return ResponseFormat(question["schema"]).failure(question["text"])


if __name__ == "__main__":
    serve(failure)
