"""The child side of `sandbox.py`: confine this process, then run a program and its tests in it.

Started as ``python -I -B -c <this file>`` with a JSON job on standard input, so it uses the standard library alone.
Three processes: the *supervisor* (this one) confines itself and waits; *init* is the first process of the new process
namespace, keeps the wall limit, and when it ends, the kernel ends whatever is left in the namespace; the *worker* runs
the program. What was achieved, and the verdict, go to the pipe whose number the job names.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import time
import types
from pathlib import Path
from typing import Any, NoReturn

NOBODY = 65534
NEW_MOUNTS, NEW_UTS, NEW_IPC, NEW_USERS, NEW_PIDS, NEW_NETWORK = (
    0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
BIND, RECURSIVE, PRIVATE = 0x1000, 0x4000, 0x40000
MOUNT_SETATTR, LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 442, 444, 445, 446  # one number on all machines
READ_SEARCH = 2  # CAP_DAC_READ_SEARCH
PR_SET_PDEATHSIG, PR_SET_KEEPCAPS, PR_SET_NO_NEW_PRIVS, PR_SET_CHILD_SUBREAPER = 1, 8, 38, 36

libc = ctypes.CDLL(None, use_errno=True)
libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]


def call(result: int) -> int:
    """Raise the OSError of a C call that failed; its result otherwise."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def new_namespaces() -> None:
    """Enter new namespaces, with the power of root or of a new user namespace; the next child is process 1."""
    user, group = os.getuid(), os.getgid()
    others = NEW_MOUNTS | NEW_UTS | NEW_IPC | NEW_PIDS | NEW_NETWORK
    call(libc.unshare(others | (NEW_USERS if user else 0)))
    if user:
        for file, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path("/proc/self", file).write_text(text)


def mount_attributes(path: str, flags: int, set_: int, clear: int) -> None:
    """Set and clear attributes of the mount at a path (mount_setattr, Linux 5.12)."""
    attributes = (ctypes.c_uint64 * 4)(set_, clear, 0, 0)
    call(libc.syscall(MOUNT_SETATTR, -100, path.encode(), flags, attributes, ctypes.sizeof(attributes)))


def read_only_but(folder: str) -> None:
    """Make every mount read-only in this mount namespace, except a folder."""
    readonly, recursive = 1, 0x8000
    call(libc.mount(None, b"/", None, RECURSIVE | PRIVATE, None))
    call(libc.mount(folder.encode(), folder.encode(), None, BIND, None))
    mount_attributes("/", recursive, readonly, 0)
    mount_attributes(folder, 0, 0, readonly)
    os.chdir("/")
    os.chdir(folder)  # through the new mount


def landlock(folder: str) -> bool:
    """Allow writing below a folder only, and no TCP (Landlock, Linux 5.13; TCP from 6.7). Tells whether TCP is shut."""
    version = call(libc.syscall(LANDLOCK_CREATE, None, 0, 1))
    # write file, remove dir/file, make char/dir/reg/sock/fifo/block/sym; refer from version 2, truncate from 3
    writing = 0b1_1111_1111_0010 | (1 << 13 if version >= 2 else 0) | (1 << 14 if version >= 3 else 0)
    tcp = 0b11 if version >= 4 else 0
    rules = (ctypes.c_uint64 * 2)(writing, tcp)
    ruleset = call(libc.syscall(LANDLOCK_CREATE, rules, 16 if tcp else 8, 0))
    for path in (folder, "/dev/null"):
        handle = os.open(path, os.O_PATH)
        allowed = writing if path == folder else writing & (0b10 | 1 << 14)
        rule = ctypes.create_string_buffer(allowed.to_bytes(8, sys.byteorder) + handle.to_bytes(4, sys.byteorder))
        call(libc.syscall(LANDLOCK_ADD, ruleset, 1, rule, 0))
        os.close(handle)
    call(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    call(libc.syscall(LANDLOCK_RESTRICT, ruleset, 0))
    os.close(ruleset)
    return bool(tcp)


def readable_by_all() -> bool:
    """Whether every user can read the interpreter and its libraries."""
    paths = [Path(path).resolve() for path in (sys.executable, *sys.path) if os.path.exists(path)]
    return all(os.stat(p).st_mode & 0o005 == 0o005 for path in paths for p in (path, *path.parents))


def drop_root() -> None:
    """Become nobody; if only root can read the interpreter, keep the capability to read, and nothing else."""
    keep = (0,) if readable_by_all() else (1 << READ_SEARCH, 0)  # the second where a container forbids the first
    libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    for kept in keep:
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)
        sets = (ctypes.c_uint32 * 6)(kept, kept, 0, 0, 0, 0)
        if libc.capset(header, sets) == 0:
            break


def tasks_of(user: int) -> int:
    """Threads that run under a user id: what RLIMIT_NPROC counts outside a user namespace."""
    count = 0
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and entry.stat().st_uid == user:
                count += len(os.listdir(f"/proc/{entry.name}/task"))
    return count


def limit(job: dict[str, Any], already: int) -> None:
    """Resource limits of the program, for every process of it; processes are counted for all together."""
    for what, most in (
        (resource.RLIMIT_AS, job["memory_bytes"]),
        (resource.RLIMIT_CPU, job["cpu_s"]),
        (resource.RLIMIT_FSIZE, job["file_bytes"]),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, already + job["processes"]),
    ):
        hard = resource.getrlimit(what)[1]
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        resource.setrlimit(what, (most, most))


def work(job: dict[str, Any], pipe: int) -> NoReturn:
    """Run the program, then its tests; write the verdict. Ends the process."""
    token, solution, tests = job.pop("token"), job["solution"], job["tests"]
    module = sys.modules["solution"] = types.ModuleType("solution")
    sys.modules["__main__"] = types.ModuleType("__main__")  # nothing of this file within easy reach
    names, kept, leave, put, as_text = vars(builtins), dict(vars(builtins)), os._exit, os.write, str
    try:
        exec(compile(solution, "<solution>", "exec"), module.__dict__)
        sys.settrace(None)
        sys.setprofile(None)
        names.update(kept)
        exec(compile(tests, "<tests>", "exec"), module.__dict__)
        verdict = {"token": token, "reason": ""}
    except BaseException as error:
        kept["__import__"]("signal").alarm(2)  # describing the error runs the program's code once more
        try:
            message = as_text(error)[:500]
        except BaseException:
            message = ""
        verdict = {"reason": f"{type(error).__name__}: {message}"}
    put(pipe, json.dumps(verdict).encode() + b"\n")
    leave(0)


def children() -> list[int]:
    """The direct children of this process."""
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def init(job: dict[str, Any], pipe: int, isolated: bool) -> NoReturn:
    """Run the worker within the wall limit, and while the supervisor lives; leave nothing behind. Ends the process."""
    awaited = (signal.SIGCHLD, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    user = os.getuid() or NOBODY
    # a user namespace counts its own processes, everything else those of the user on the whole machine
    already = 0 if isolated and user != NOBODY else tasks_of(user)
    if isolated:  # as it may be forbidden in a container: the program then sees the outer /proc
        libc.mount(b"proc", b"/proc", b"proc", 0, None)
    if os.getuid() == 0:
        drop_root()
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)  # a change of the user would forget it
    until = time.monotonic() + job["wall_s"]
    worker = os.fork()
    if worker == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)
        limit(job, already)
        work(job, pipe)
    status, reason = None, f"TimeoutError: no result within {job['wall_s']:g} s"
    while status is None and (left := until - time.monotonic()) > 0:
        received = signal.sigtimedwait(awaited, left)
        if received is not None and received.si_signo == signal.SIGTERM:
            break
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == worker:
                    status = ended[1]
    if status is not None:
        number = os.waitstatus_to_exitcode(status)
        how = f"was killed by signal {-number}" if number < 0 else f"ended with status {number}"
        reason = f"SystemExit: the process {how} before its tests were through"
    os.write(pipe, json.dumps({"reason": reason}).encode() + b"\n")  # the worker's own verdict, if any, came before
    if not isolated:
        with contextlib.suppress(OSError, ChildProcessError):
            while found := children():  # what has no parent any more becomes a child of this process
                for pid in found:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
    os._exit(0)


def main() -> NoReturn:
    """Supervise one job."""
    job = json.loads(sys.stdin.buffer.read())
    pipe, folder = job["pipe"], job["folder"]
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    achieved = []
    if job["namespaces"]:
        with contextlib.suppress(OSError):
            new_namespaces()
            achieved += ["network", "leftovers"]
            read_only_but(folder)
            achieved.append("writes")
    isolated = "leftovers" in achieved
    if "writes" not in achieved:
        with contextlib.suppress(OSError):
            achieved += ["writes", "tcp"] if landlock(folder) else ["writes"]
    os.write(pipe, json.dumps({"achieved": achieved}).encode() + b"\n")
    child = os.fork()
    if child == 0:
        init(job, pipe, isolated)
    os.waitpid(child, 0)
    os._exit(0)


if __name__ == "__main__":
    main()
