"""Child processes that answer questions, a line of JSON each: for libraries that may block, and need a main thread."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from threading import Lock
from typing import Any

from lopa_dist.tasks.task import Cancelled

ATTEMPTS = 2  # a child may be killed by a signal that was meant for the job, before it knows to ignore it


class Lost(Exception):
    """A worker gave no answer; the message says why."""


class TooLong(Lost):
    """It took too long, and would again."""


class Worker:
    """One child, which runs ``python -m MODULE``; that module's main is `serve`."""

    def __init__(self, module: str) -> None:
        path = os.pathsep.join(filter(None, sys.path))  # what this process can import
        self.process = subprocess.Popen(
            [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path},
        )  # fmt: skip

    def ask(self, question: Any, within_s: float) -> Any:
        """Return the child's answer.

        Raises:
            Lost: no answer came, or none within `within_s` seconds.
        """
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(question).encode() + b"\n")
            stdin.flush()
            waiting = select.poll()
            waiting.register(stdout)
            if not waiting.poll(1000 * within_s):
                raise TooLong(f"took more than {within_s:g} s")
            line = stdout.readline()
        except (OSError, ValueError) as error:  # the pipe is broken, or closed by `end`
            raise Lost(str(error)) from error
        if not line:
            raise Lost(f"ended with status {self.process.wait()}")
        return json.loads(line)

    def end(self) -> None:
        """End the child, whatever it does."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # what it did not read is still in the buffer
                pipe.close()


class Workers:
    """As many workers as questions are asked at once; several threads may ask."""

    def __init__(self, module: str, within_s: float) -> None:
        self.module, self.within_s = module, within_s
        self.idle: list[Worker] = []
        self.all: set[Worker] = set()
        self.ended, self.lock = False, Lock()

    def ask(self, question: Any) -> Any:
        """A worker's answer.

        Raises:
            Lost: none gave one: the last one's reason.
            Cancelled: `end` was called.
        """
        for attempt in range(1, ATTEMPTS + 1):
            worker = self.borrow()
            try:
                answer = worker.ask(question, self.within_s)
            except Lost as lost:
                worker.end()
                with self.lock:
                    self.all.discard(worker)
                if not self.ended and (attempt == ATTEMPTS or isinstance(lost, TooLong)):
                    raise
                continue
            self.idle.append(worker)
            return answer
        raise Cancelled

    def borrow(self) -> Worker:
        """An idle worker; a new one if all are busy."""
        with self.lock:
            if self.ended:
                raise Cancelled
            if self.idle:
                return self.idle.pop()
            worker = Worker(self.module)
            self.all.add(worker)
            return worker

    def end(self) -> None:
        """End all children; whoever waits for one, and asks from now on, gets `Cancelled`."""
        with self.lock:
            self.ended = True
            for worker in self.all:
                worker.end()


def serve(answer: Callable[[Any], Any]) -> None:
    """The child's side. It ends with its input, and so with its parent, however that ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # they are for the job, which ends its workers itself
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # what a library prints must not be taken for an answer
        for line in sys.stdin.buffer:
            out.write(json.dumps(answer(json.loads(line))) + "\n")
            out.flush()
