"""Child processes that answer questions, for libraries that may block or that need a main thread."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any

from lopa_dist.tasks.task import Cancelled

PAUSE_S = 1.0  # before a worker that could not be started is started again
ATTEMPTS = 2  # a signal that was meant for the job may kill a child before it ignores signals


class Lost(Exception):
    """A worker gave no answer; the message says why."""


class TooLong(Lost):
    """A worker took too long, and would do so again."""


class Worker:
    """One child, which runs ``python -m MODULE``; that module's main is `serve`. Questions and answers are JSON."""

    def __init__(self, module: str) -> None:
        importable = os.pathsep.join(filter(None, sys.path))
        self.connection, of_child = Pipe()
        with of_child:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(of_child.fileno())],
                pass_fds=[of_child.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a library prints is no result of the job
                env=os.environ | {"PYTHONPATH": importable},
            )

    def ask(self, question: Any, within_s: float) -> Any:
        """Return the child's answer.

        Raises:
            Lost: no answer came, or none within `within_s` seconds.
        """
        try:
            self.connection.send_bytes(json.dumps(question).encode())
            if not self.connection.poll(within_s):
                raise TooLong(f"took more than {within_s:g} s")
            return json.loads(self.connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise Lost(f"ended with status {self.process.wait()}") from error

    def end(self) -> None:
        """End the child, whatever it is doing."""
        self.process.kill()
        self.process.wait()


class Workers:
    """A pool that grows to as many workers as questions are asked at once; several threads may ask."""

    def __init__(self, module: str, within_s: float) -> None:
        self.module, self.within_s = module, within_s
        self.idle: list[Worker] = []
        self.all: set[Worker] = set()
        self.ended, self.lock = False, Lock()

    def ask(self, question: Any) -> Any:
        """Return a worker's answer.

        Raises:
            Lost: no worker gave an answer; the message is the last one's.
            Cancelled: `end` was called.
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                worker = self.borrow()
            except OSError as error:  # no memory for another process, or too many of them: there may be soon
                if attempt == ATTEMPTS:
                    raise Lost(f"cannot be started ({error})") from error
                time.sleep(PAUSE_S)
                continue
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
        """Return an idle worker, or a new one if all are busy."""
        with self.lock:
            if self.ended:
                raise Cancelled
            if self.idle:
                return self.idle.pop()
            worker = Worker(self.module)
            self.all.add(worker)
            return worker

    def end(self) -> None:
        """End all children; threads that wait for an answer, or ask from now on, get `Cancelled`."""
        with self.lock:
            self.ended = True
            for worker in self.all:
                worker.end()


def serve(answer: Callable[[Any], Any]) -> None:
    """Answer the parent's questions in the child, until the parent ends, however it does, or closes the connection."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the job, which ends its workers itself
    with Connection(int(sys.argv[1])) as parent, contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            question = json.loads(parent.recv_bytes())
            parent.send_bytes(json.dumps(answer(question)).encode())
