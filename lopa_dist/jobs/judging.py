"""Answers are judged beside decoding: no step, no collective and no stop waits for a program that hangs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from lopa_dist.engine.request import Generation
from lopa_dist.tasks.task import Item, Score, SlowTask, Task


@dataclass(frozen=True)
class Answer:
    """A finished request, and when it was finished: judging is no part of its time."""

    item: Item
    generation: Generation
    text: str
    at: float


Verdict = tuple[Answer, Score | None]


class Judges(contextlib.AbstractContextManager["Judges"]):
    """Judges answers: at once where that is quick, else in threads, `at_once` answers at a time.

    However many answers wait: a text is small beside what made it. Everything is called from one thread, so verdicts
    are collected there; what is not judged when the context ends is given up.
    """

    def __init__(self, task: Task, at_once: int) -> None:
        self.task = task
        self.slow = task if isinstance(task, SlowTask) else None
        self.pool = ThreadPoolExecutor(at_once, "judge")  # starts no thread before it has work
        self.open: dict[Future[Score | None], Answer] = {}  # without a verdict, or with one not collected yet
        self.finished: SimpleQueue[Future[Score | None]] = SimpleQueue()

    def __exit__(self, *_: object) -> None:
        if self.slow:
            self.slow.cancel()
        self.pool.shutdown(cancel_futures=True)

    def submit(self, answer: Answer) -> None:
        """Judge this, now or later; there is no verdict on what ended with an error."""
        future: Future[Score | None]
        failed = answer.generation.finish_reason == "error"
        if self.slow and not failed:
            future = self.pool.submit(self.slow.score, answer.item, answer.text)
        else:
            future = Future()
            future.set_result(None if failed else self.task.score(answer.item, answer.text))
        self.open[future] = answer
        future.add_done_callback(self.finished.put)

    def verdicts(self, wait_s: float = 0.0) -> Iterator[Verdict]:
        """What has been judged since the last call; if nothing has, what is within `wait_s`.

        Raises:
            Exception: whatever judging one of the answers raised.
        """
        with contextlib.suppress(Empty):
            future = self.finished.get(timeout=wait_s)
            while True:
                yield self.open.pop(future), future.result()
                future = self.finished.get_nowait()
