"""A worker for tests: it does what it is asked."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from lopa_dist.tasks.worker import serve


def answer(question: dict[str, Any]) -> Any:
    if "print" in question:
        os.write(1, b"noise\n")
        print("more noise", flush=True)
    if "once" in question and not Path(question["once"]).exists():
        Path(question["once"]).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if "signal" in question:
        os.kill(os.getpid(), question["signal"])
    time.sleep(question.get("sleep", 0))
    return [os.getpid(), question.get("echo")]


if __name__ == "__main__":
    serve(answer)
