"""Runs code that a model wrote, in a child process that can do little harm.

What holds for every run: an environment without the user's variables (so without keys), an empty temporary folder as
the working directory, limits of wall time, CPU time, memory (a process), processes (together) and file size, output
thrown away, and all processes of the run ended with it. As root, the program runs as *nobody*. Several programs may
run at a time, each in a run of its own; as root, or without namespaces, the kernel counts their processes together.

What depends on the machine, see `Confinement`: no network and no process left behind under any circumstances, if
namespaces may be made (Linux with unprivileged user namespaces, or root), else no TCP, if Landlock can forbid it; no
writing outside the temporary folder, by a mount namespace or by Landlock. What is never prevented: reading what the
user can read (root's files too, where only root can read the interpreter), and using the CPU and the memory within
the limits.

A program passes only if its tests ran to their end: it is the test runner, after the last test, that says so, with a
random token. The runner shares the interpreter with the program, as all Python benchmarks do. It survives programs
that end the process, replace built-in functions, the check function or the `__main__` module; a program written to
search the interpreter's frames for the token, or to return objects that are equal to everything, is beyond it.
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

from lopa_dist.tasks.task import Cancelled

CHILD = Path(__file__).with_name("sandbox_child.py")
MOST_ANSWER = 65536  # bytes read from a run; all else is noise
GRACE_S = 5.0  # for start-up and clearing away
TICK_S = 0.1  # how soon a cancelled run ends
CLEARING_S = 1.0  # for its init to clear away


@dataclass(frozen=True)
class Limits:
    """What one run may use."""

    wall_s: float = 10.0
    cpu_s: int = 30  # of each process
    memory_bytes: int = 4 << 30  # address space of each process
    processes: int = 16  # threads included
    file_bytes: int = 16 << 20


@dataclass(frozen=True)
class Outcome:
    """Whether a program passed its tests, and if not, why (``AssertionError: ...``)."""

    passed: bool
    reason: str
    achieved: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Confinement:
    """What this machine lets us take away from a program."""

    network: bool
    writes: bool
    leftovers: bool  # no process outlives the run, whatever it does
    tcp: bool  # where the network cannot be taken away as a whole

    def missing(self) -> str:
        """In words, for the user; empty if all of it works."""
        holes = []
        if not self.network:
            holes.append("it can use the network" + (", though not TCP" if self.tcp else ""))
        if not self.writes:
            holes.append("it can write wherever you can")
        if not self.leftovers:
            holes.append("a process that hides well may outlive its run")
        return ", ".join(holes)


@cache
def confinement() -> Confinement:
    """Find out, with a run of next to nothing; a ValueError where not even that runs."""
    outcome = run_tests("import random", "", Limits())  # an import shows that the interpreter can be read
    if not outcome.passed:
        raise ValueError(
            f"task.allow_code_execution=true: a program cannot be run confined here ({outcome.reason}); run as an "
            "ordinary user on Linux, with a Python that all users can read"
        )
    return Confinement(*(what in outcome.achieved for what in ("network", "writes", "leftovers", "tcp")))


def run_tests(
    solution: str, tests: str, limits: Limits, namespaces: bool = True, cancelled: Event | None = None
) -> Outcome:
    """Run a program, then its tests in the same module.

    `namespaces=False` does without them, as on machines that forbid them.

    Raises:
        Cancelled: `cancelled` was set before there was an outcome.
    """
    token = secrets.token_hex(16)
    folder = tempfile.mkdtemp(prefix="lopa-run-")
    reader, writer = os.pipe()
    try:
        if os.getuid() == 0:
            os.chown(folder, 65534, 65534)
        job = {
            **asdict(limits), "solution": solution, "tests": tests, "token": token, "pipe": writer, "folder": folder,
            "namespaces": namespaces,
        }  # fmt: skip
        environment = {
            "PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
        }  # fmt: skip
        command = [sys.executable, "-I", "-B", "-c", CHILD.read_text(encoding="utf-8")]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder,
            env=environment, pass_fds=[writer], start_new_session=True,
        )  # fmt: skip
        os.close(writer)
        writer = -1
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
                stdin.write(json.dumps(job).encode())
            answers = read_answers(reader, time.monotonic() + limits.wall_s + GRACE_S, cancelled)
        finally:
            end(process.pid, reader)
            process.wait()
        return judge(answers, token)
    finally:
        os.close(reader)
        if writer >= 0:
            os.close(writer)
        shutil.rmtree(folder, ignore_errors=True)


def end(supervisor: int, reader: int) -> None:
    """End the processes of a run: its init, left alone, ends those that it knows; those in the group are killed."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(supervisor, signal.SIGKILL)
        read_answers(reader, time.monotonic() + CLEARING_S)  # the pipe is closed when all have ended
        os.killpg(supervisor, signal.SIGKILL)


def read_answers(reader: int, until: float, cancelled: Event | None = None) -> bytes:
    """What comes through the pipe until it is closed, the time is up, or it is too much; else as `run_tests`."""
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


def judge(answers: bytes, token: str) -> Outcome:
    """Passed if a line holds the token; else the first reason given. Lines that the program forged are skipped."""
    achieved: frozenset[str] = frozenset()
    reason = ""
    for number, line in enumerate(answers.split(b"\n")):
        try:
            answer = json.loads(line)
            if number == 0:
                achieved = frozenset(answer["achieved"])
                continue
            if answer.get("token") == token:
                return Outcome(True, "", achieved)
            reason = reason or str(answer["reason"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
    return Outcome(False, reason or "the program's process could not be run", achieved)
