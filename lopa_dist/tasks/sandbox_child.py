"""The child side of `sandbox.py`: it runs a program and its tests within limits.

It is started as ``python -I -B -c <this file>``, by bubblewrap or without it, so it uses the standard library alone.
Its input is a JSON job on one line. When the input ends, however the parent ends, so does the run.

There are two processes. *init* enforces the limits of all processes together, and leaves none behind (if confined, it
is process 1 of its namespace, and the kernel ends the others with it). The *worker* runs the program. The pipe whose
number the job names gets a line when the program begins, and then the verdict.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import ctypes
import importlib
import json
import os
import resource
import select
import signal
import sys
import time
import types
from pathlib import Path
from typing import Any, NoReturn

TICK_S = 0.05  # between looks at what all processes use together
READ_SEARCH = 2  # CAP_DAC_READ_SEARCH
PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_SET_NO_NEW_PRIVS, PR_SET_CHILD_SUBREAPER = 4, 8, 38, 36

libc = ctypes.CDLL(None, use_errno=True)


def become(user: int, keep_reading: bool) -> None:
    """Become `user` instead of root; `keep_reading` keeps the capability to read all files, and no other."""
    libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    for capabilities in (1 << READ_SEARCH if keep_reading else 0, 0):  # the second if a container forbids the first
        if libc.capset(header, (ctypes.c_uint32 * 6)(capabilities, capabilities, 0, 0, 0, 0)) == 0:
            break


def readable_by_all() -> bool:
    """Return whether every user can read the interpreter and its libraries."""
    paths = [Path(path).resolve() for path in (sys.executable, *sys.path) if os.path.exists(path)]
    return all(os.stat(p).st_mode & 0o005 == 0o005 for path in paths for p in (path, *path.parents))


def tasks_of(user: int) -> int:
    """Return how many threads run under a user id: RLIMIT_NPROC counts these outside a user namespace."""
    count = 0
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and entry.stat().st_uid == user:
                count += len(os.listdir(f"/proc/{entry.name}/task"))
    return count


def limit(job: dict[str, Any], already: int) -> None:
    """Set the program's limits, which hold for each of its processes; their number is limited for all together."""
    for what, most in (
        (resource.RLIMIT_AS, job["memory_bytes"]),
        (resource.RLIMIT_CPU, job["cpu_s"]),
        (resource.RLIMIT_FSIZE, job["file_bytes"]),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_NPROC, already + job["processes"]),
    ):
        hard = resource.getrlimit(what)[1]
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        resource.setrlimit(what, (most, most))


def imported(source: str) -> list[str]:
    """Return the modules that a source imports by name."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError):
        return []
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return names + [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]


def work(job: dict[str, Any], pipe: int) -> NoReturn:
    """Run the program, then its tests; write the verdict to `pipe`, and end the process."""
    token, solution, tests = job.pop("token"), job["solution"], job["tests"]
    for name in imported(tests):
        with contextlib.suppress(BaseException):  # the tests themselves will report it
            importlib.import_module(name)
    # what the tests use is restored after the program has run, which may have replaced any of it
    modules = {
        name: module
        for name, module in sys.modules.items()
        if isinstance(module, types.ModuleType) and name not in ("__main__", "sys", "builtins")
    }
    contents = {name: dict(vars(module)) for name, module in modules.items()}
    loaded = sys.modules
    module = loaded["solution"] = types.ModuleType("solution")
    loaded["__main__"] = types.ModuleType("__main__")  # nothing of this file within easy reach
    real_builtins, builtin_names, builtin_contents = builtins, vars(builtins), dict(vars(builtins))
    trace_functions = sys.settrace, sys.setprofile
    leave, write, dumps, alarm, as_text = os._exit, os.write, json.dumps, signal.alarm, str
    try:
        exec(compile(solution, "<solution>", "exec"), module.__dict__)
        for function in trace_functions:
            function(None)
        builtin_names.update(builtin_contents)
        loaded["builtins"] = module.__dict__["__builtins__"] = real_builtins
        loaded.update(modules)
        for name, content in contents.items():
            vars(modules[name]).update(content)
        exec(compile(tests, "<tests>", "exec"), module.__dict__)
        verdict = {"token": token, "reason": ""}
    except BaseException as error:
        alarm(2)  # describing the error runs the program's code once more
        try:
            message = as_text(error)[:500]
        except BaseException:
            message = ""
        verdict = {"reason": f"{type(error).__name__}: {message}"}
    write(pipe, dumps(verdict).encode() + b"\n")
    leave(0)


def too_much(job: dict[str, Any]) -> str:
    """Return in words which limit all processes of a confined run together exceed; empty if none."""
    resident = 0
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            if entry.name.isdigit():
                resident += (
                    int(Path(entry.path, "statm").read_text(encoding="utf-8").split()[1]) * resource.getpagesize()
                )
    if resident > job["memory_bytes"]:
        return f"MemoryError: its processes together took more than {job['memory_bytes'] >> 20} MiB"
    for folder in (os.getcwd(), "/dev/shm"):
        system = os.statvfs(folder)
        if system.f_files - system.f_ffree > job["files"]:
            return f"OSError: more than {job['files']} files"
    return ""


def watch(job: dict[str, Any], worker: int) -> str:
    """Wait until the worker ends, the time is up, or a limit is exceeded; return the reason for a missing verdict."""
    until, parent = time.monotonic() + job["wall_s"], select.poll()
    parent.register(0, select.POLLHUP)
    while (left := until - time.monotonic()) > 0:
        signal.sigtimedwait([signal.SIGCHLD], min(left, TICK_S))
        if parent.poll(0):
            return "SystemExit: ended from outside"
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == worker:
                    number = os.waitstatus_to_exitcode(ended[1])
                    how = f"was killed by signal {-number}" if number < 0 else f"ended with status {number}"
                    return f"SystemExit: the process {how} before its tests were through"
        if job["confined"] and (reason := too_much(job)):
            return reason
    return f"TimeoutError: no result within {job['wall_s']:g} s"


def main() -> NoReturn:
    """Run one job; leave nothing behind."""
    job = json.loads(sys.stdin.buffer.readline())
    pipe, user, confined = job["pipe"], job["user"], job["confined"]
    # a user namespace counts only its own processes, and a user of the run's own has none yet
    already = 0 if confined or user is not None else tasks_of(os.getuid())
    if user is not None:
        become(user, keep_reading=not confined and not readable_by_all())
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # no process of the program can look into this one
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    null = os.open(os.devnull, os.O_RDWR)
    worker = os.fork()
    if worker == 0:
        os.write(pipe, b"begun\n")
        for standard in (0, 1, 2):
            os.dup2(null, standard)
        libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        limit(job, already)
        work(job, pipe)
    reason = watch(job, worker)
    os.write(pipe, json.dumps({"reason": reason}).encode() + b"\n")  # the worker's own verdict, if any, came before
    if not confined:
        end_all(user)
    os._exit(0)


def end_all(user: int | None) -> None:
    """End all processes of the program: those without a parent have become children of this one.

    Processes that fork all the time are faster than ending them one by one.

    Args:
        user: of the run's own, as which no other process runs; None: there is none.
    """
    if user is not None:
        with contextlib.suppress(OSError):
            os.kill(-1, signal.SIGKILL)  # all at once, without this one
    stopped: set[int] = set()
    while new := descendants(os.getpid()) - stopped:  # until none forks any more
        for pid in new:
            send(pid, signal.SIGSTOP)
        stopped |= new
    with contextlib.suppress(OSError):
        while pids := descendants(os.getpid()):
            for pid in pids:
                send(pid, signal.SIGKILL)
            os.waitpid(-1, 0)


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, unless it has ended."""
    with contextlib.suppress(OSError):
        os.kill(pid, number)


def descendants(pid: int) -> set[int]:
    """Return the processes that a process and its descendants have started, and that have not been waited for."""
    found, parents = set[int](), [pid]
    while parents:
        for file in Path(f"/proc/{parents.pop()}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # it has just ended
                children = set(map(int, file.read_text(encoding="utf-8").split())) - found
                found |= children
                parents += children
    return found


if __name__ == "__main__":
    main()
