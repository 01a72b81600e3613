"""Judging of answers in parallel with decoding: a program that hangs delays no step, collective or stop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, Queue
from threading import Event

from lopa_dist.engine.request import Generation
from lopa_dist.tasks.task import Cancelled, CannotJudge, Item, Score, SlowTask, Task, score_of, why_unjudged

PAUSES_S = (0.5, 5.0)  # before judging is tried again


@dataclass(frozen=True)
class Answer:
    """A finished request, and when it was finished: its time does not include judging."""

    item: Item
    generation: Generation
    text: str
    at: float
    reasoning: str | None = None  # what came before the text, if the model marks it


@dataclass(frozen=True)
class Verdict:
    """The outcome of judging an answer.

    Attributes:
        score: None if there are no right answers, or judging failed.
        failure: why judging failed every time; it says nothing about the answer.
    """

    answer: Answer
    score: Score | None
    failure: str = ""


class Judges(contextlib.AbstractContextManager["Judges"]):
    """Judges answers: immediately if that is quick, else in threads, `at_once` answers at a time.

    Any number of answers may wait: a text is small compared with what made it. Answers are submitted, and verdicts
    collected, in one thread. What is not judged when the context ends is given up.

    If judging fails (no process for a program, no memory, a fault of the task), threads try again after `PAUSES_S`:
    otherwise a brief failure would count for good.
    """

    def __init__(self, task: Task, at_once: int) -> None:
        self.task = task
        self.slow = task if isinstance(task, SlowTask) else None
        self.ending = Event()
        self.pool = ThreadPoolExecutor(at_once, "judge")  # starts no thread before it has work
        self.open = set[Future[Verdict]]()  # answers without a verdict, or whose verdict is not collected yet
        # no SimpleQueue: in Python 3.10, one that is empty may wait for ever in spite of a timeout
        self.finished: Queue[Future[Verdict]] = Queue()

    def __exit__(self, *_: object) -> None:
        self.ending.set()
        if self.slow:
            self.slow.cancel()
        self.pool.shutdown(cancel_futures=True)

    def submit(self, answer: Answer) -> None:
        """Judge `answer`, now or later; one that ended with an error gets no score."""
        future: Future[Verdict]
        if self.slow and answer.generation.finish_reason != "error":
            future = self.pool.submit(self.judge, answer, PAUSES_S)
        else:
            future = Future()
            future.set_result(self.judge(answer, ()))
        self.open.add(future)
        future.add_done_callback(self.finished.put)

    def judge(self, answer: Answer, pauses_s: Sequence[float]) -> Verdict:
        """Return the verdict on `answer`; if judging fails, try again after each pause.

        Raises:
            Cancelled: judging was cancelled.
            CannotJudge: the task can judge no answer at all.
        """
        if answer.generation.finish_reason == "error":
            return Verdict(answer, None)
        failure = ""
        for pause_s in (0.0, *pauses_s):
            if self.ending.wait(pause_s):
                raise Cancelled
            try:
                return Verdict(answer, self.score(answer))
            except (Cancelled, CannotJudge):
                raise
            except (Exception, SystemExit) as error:  # a task's libraries raise whatever they like
                failure = why_unjudged(error)
        return Verdict(answer, None, failure)

    def score(self, answer: Answer) -> Score | None:
        """Return what the task says of an answer's text or likelihoods."""
        return score_of(self.task, answer.item, answer.text, answer.generation.likelihoods)

    def verdicts(self, wait_s: float = 0.0) -> Iterator[Verdict]:
        """Yield the verdicts since the last call; if there are none, wait up to `wait_s` seconds for one.

        Raises:
            CannotJudge: the task can judge no answer.
        """
        with contextlib.suppress(Empty):
            future = self.finished.get(timeout=wait_s)
            while True:
                self.open.remove(future)
                yield future.result()
                future = self.finished.get_nowait()
