"""Runs code that a model wrote, in a child process that can do little harm.

Bubblewrap confines the program (`bubblewrap.py`): it sees the system's libraries and this Python, but none of the
user's files, no other process, no network and no socket of the machine. It has no capabilities, and some system calls
are refused (`system_calls.py`). We set the limits: wall time, CPU time, memory of each process and of all together,
number of processes, files. What the program writes stays in memory and vanishes with it, and so do its processes.

Without bubblewrap, a program runs only if the user asks for it (``unconfined``). It then has the limits, and an
environment without the user's variables, but can otherwise do whatever the user can. If we are root, the program runs
in both cases as a user that owns nothing else.

A program passes only if its tests ran to their end: after the last test, the test runner says so with a random token.
The runner shares the interpreter with the program, as in all Python benchmarks. It survives programs that end the
process, or replace built-in functions, the check function, or what the tests import. It does not withstand a program
written to search the interpreter's frames for the token, or to return objects that are equal to everything.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from threading import Event

from lopa_dist.tasks import bubblewrap
from lopa_dist.tasks.system_calls import filter_program
from lopa_dist.tasks.task import Cancelled

CHILD = Path(__file__).with_name("sandbox_child.py")
MOST_ANSWER = 65536  # the most bytes read from a run; more would be noise
GRACE_S = 30.0  # extra time for start-up: the child itself enforces the wall limit
TICK_S = 0.1  # how soon a cancelled run ends
CLEARING_S = 1.0  # for the first process of a run to end the others
OWN_USERS = 1 << 20  # user ids among which a run's own is drawn


class NotRun(Exception):
    """The program was not run, which says nothing about it; the message has the reason."""


@dataclass(frozen=True)
class Limits:
    """What one run may use."""

    wall_s: float = 10.0
    cpu_s: int = 30  # of each process
    memory_bytes: int = 4 << 30  # address space of each process, and resident memory of all together
    processes: int = 16  # threads included
    file_bytes: int = 16 << 20
    disk_bytes: int = 128 << 20  # of all files in /tmp, and of those in /dev/shm; only if confined
    files: int = 10_000


@dataclass(frozen=True)
class Outcome:
    """Whether a program passed its tests, and if not, why (``AssertionError: ...``)."""

    passed: bool
    reason: str


@cache
def check(confined: bool) -> None:
    """Check that programs can be run here, by running one that does almost nothing.

    Raises:
        ValueError: they cannot; the message has the reason and the remedy.
    """
    setting = f"task.allow_code_execution={'true' if confined else 'unconfined'}"
    other = " Or task.allow_code_execution=unconfined runs them with limits only: they can do whatever you can."
    if not sys.platform.startswith("linux"):
        raise ValueError(f"{setting}: programs are run on Linux only; false generates without judging")
    try:
        outcome = run_tests("import random", "", Limits(), confined)  # an import shows that the interpreter can be read
    except NotRun as error:
        raise ValueError(
            f"{setting}: programs cannot be run {'confined ' if confined else ''}here: {error}. Bubblewrap (bwrap) "
            "must be there and able to make namespaces, as root or as an ordinary user where the system allows that, "
            f"and all users must be able to read this Python.{other if confined else ''}"
        ) from error
    if not outcome.passed:
        raise ValueError(f"{setting}: Python does not work there ({outcome.reason}).{other if confined else ''}")


def run_tests(
    solution: str, tests: str, limits: Limits, confined: bool = True, cancelled: Event | None = None
) -> Outcome:
    """Return the outcome of running a program, and then its tests in the same module.

    Raises:
        NotRun: the program could not be started.
        Cancelled: `cancelled` was set before there was an outcome.
    """
    token = secrets.token_hex(16)
    with contextlib.ExitStack() as stack:
        folder = bubblewrap.WORK
        if not confined:
            folder = tempfile.mkdtemp(prefix="lopa-run-")
            # not `TemporaryDirectory`: up to Python 3.11, it changes permissions through links that a program made
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        ends = os.pipe()
        reader, writer = stack.enter_context(os.fdopen(ends[0], "rb")), stack.enter_context(os.fdopen(ends[1], "wb"))
        said = stack.enter_context(tempfile.TemporaryFile())  # what goes wrong before the program begins
        user = own_user() if os.getuid() == 0 else None
        if user is not None and not confined:
            os.chown(folder, user, user)
        job = asdict(limits) | {
            "solution": solution, "tests": tests, "token": token, "pipe": writer.fileno(), "user": user,
            "confined": confined,
        }  # fmt: skip
        environment = {
            "PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
        }  # fmt: skip
        python = os.path.abspath(sys.executable)  # as `bubblewrap.visible`: a path with .. may not lead there
        command, descriptors = [python, "-I", "-B", "-c", CHILD.read_text(encoding="utf-8")], [writer.fileno()]
        try:
            if confined:
                rules = stack.enter_context(tempfile.TemporaryFile())
                rules.write(filter_program())
                rules.seek(0)
                descriptors.append(rules.fileno())
                command = [*bubblewrap.command(rules.fileno(), limits.disk_bytes), *command]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=said, env=environment,
                cwd="/" if confined else folder, pass_fds=descriptors, start_new_session=True,
            )  # fmt: skip
        except (OSError, ValueError) as error:
            raise NotRun(str(error)) from error
        writer.close()
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(job).encode() + b"\n")
                process.stdin.flush()
            answers = read_answers(reader.fileno(), time.monotonic() + limits.wall_s + GRACE_S, cancelled)
        finally:
            end(process, reader.fileno())
        said.seek(0)
        return judge(answers, token, said.read(MOST_ANSWER).decode(errors="replace"))


def own_user() -> int:
    """Return a user id only for this run, so that it reaches no other process and no other counts towards its limit."""
    first, _, count = map(int, Path("/proc/self/uid_map").read_text(encoding="utf-8").splitlines()[-1].split())
    return first + count - 2 - secrets.randbelow(max(1, min(OWN_USERS, count // 4)))


def end(process: subprocess.Popen[bytes], reader: int) -> None:
    """End the processes of a run. Closing the first one's input ends it and all others; any that remain are killed."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    read_answers(reader, time.monotonic() + CLEARING_S)  # the pipe is closed when all have ended
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read_answers(reader: int, until: float, cancelled: Event | None = None) -> bytes:
    """Return what comes through the pipe until it is closed, the time is up, or it is too much to read.

    Raises:
        Cancelled: `cancelled` was set before.
    """
    received = b""
    with selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        while len(received) < MOST_ANSWER and (left := until - time.monotonic()) > 0:
            if cancelled and cancelled.is_set():
                raise Cancelled
            if selector.select(min(left, TICK_S)):
                part = os.read(reader, MOST_ANSWER)
                if not part:
                    break
                received += part
    return received


def judge(answers: bytes, token: str, said: str = "") -> Outcome:
    """Return the outcome: passed if a line has the token, else the first reason given; other lines are skipped.

    Raises:
        NotRun: the first line does not say that the program began; the message is from that line or from `said`.
    """
    first, *others = answers.split(b"\n")
    if first != b"begun":
        lines = [line for line in (first.decode(errors="replace"), *said.splitlines()) if line.strip()]
        raise NotRun(lines[-1] if lines else "its process ended before it began")
    reason = ""
    for line in others:
        try:
            answer = json.loads(line)
            if answer.get("token") == token:
                return Outcome(True, "")
            reason = reason or str(answer["reason"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
    return Outcome(False, reason or "the process ended without a verdict")
