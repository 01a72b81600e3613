"""What a person sees while a job runs: one live line on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import logging
import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)

from lopa_dist.engine.request import Generation
from lopa_dist.engine.statistics import Statistics

log = logging.getLogger("lopa_dist")


class ProgressDisplay:
    """Requests done, tokens/s, TPF, share of lookahead wins, time left."""

    def __init__(self, mode: str, total: int, statistics: Statistics, every_s: float) -> None:
        console = Console(stderr=True)
        self.live = mode == "always" or (mode == "auto" and console.is_terminal)
        self.silent, self.total, self.statistics, self.every_s = mode == "never", total, statistics, every_s
        self.began = self.last = time.perf_counter()
        self.done = self.tokens = self.forwards = self.right = self.judged = 0
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
        )
        self.progress = Progress(*columns, console=console, disable=not self.live)
        self.task = self.progress.add_task("generating", total=total, status="")

    def __enter__(self) -> ProgressDisplay:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def update(self, generation: Generation | None, correct: bool | None = None) -> None:
        """One more request is done (None: one that could not run)."""
        self.done += 1
        if generation is not None:
            self.tokens += len(generation.tokens)
            self.forwards += generation.forwards
        if correct is not None:
            self.judged += 1
            self.right += correct
        self.progress.update(self.task, completed=self.done, status=self.status())
        now = time.perf_counter()
        if not self.live and not self.silent and (now - self.last >= self.every_s or self.done == self.total):
            self.last = now
            log.info("%d/%d requests, %s", self.done, self.total, self.status())

    def status(self) -> str:
        """The figures so far, in one line."""
        rate = self.tokens / max(1e-9, time.perf_counter() - self.began)
        parts = [f"{rate:.0f} tokens/s", f"TPF {self.tokens / max(1, self.forwards):.2f}"]
        if self.judged:
            parts.append(f"{self.right / self.judged:.1%} right")
        choices = sum(self.statistics.wins.values())
        if choices:
            parts.append(f"lookahead won {1 - self.statistics.wins[0] / choices:.0%}")
        return ", ".join(parts)
