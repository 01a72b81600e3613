"""How bubblewrap (`bwrap`) is called to confine a program: what it sees, where it may write, what is taken from it.

The program sees the system's libraries, the Python that runs this process, and nothing else: no home, no keys, no
socket of a running service. It writes to two file systems in memory, which vanish with it. It has its own namespaces
for processes, network, mounts and shared memory, and no capabilities.
"""

from __future__ import annotations

import os
import shutil
import site
import sys
import sysconfig
from functools import cache
from pathlib import Path

TEMPORARY = ("/tmp", "/dev/shm")  # inside the sandbox: file systems in memory
WORK = "/tmp/lopa-run"  # the working directory, apart from what else is visible below /tmp, such as a user's Python
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SETTINGS = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")  # none holds a secret
REMEDY = "install bubblewrap (apt install bubblewrap, dnf install bubblewrap)"


def command(seccomp: int, disk_bytes: int) -> list[str]:
    """Return the words to put before a command to confine it.

    Args:
        seccomp: a file descriptor from which the system call filter is read.
        disk_bytes: how much the program may write to each of its two file systems.

    Raises:
        ValueError: there is no `bwrap`.
    """
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise ValueError(f"there is no bwrap: {REMEDY}")
    words = [bwrap, "--die-with-parent", "--as-pid-1", "--new-session", "--seccomp", str(seccomp), "--cap-drop", "ALL"]
    words += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    if os.getuid() == 0:  # the child needs these two to become a user that owns nothing, and loses them with that
        words += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        words += ["--unshare-user"]
    words += ["--proc", "/proc", "--dev", "/dev"]
    for folder in TEMPORARY:
        words += ["--perms", "1777", "--size", str(disk_bytes), "--tmpfs", folder]
    words += ["--perms", "0777", "--dir", WORK]
    for path in visible():
        for folder in [*map(str, Path(path).parents)][-2::-1]:
            words += ["--perms", "0755", "--dir", folder]  # not the host's own, which may be closed to others
        words += ["--ro-bind", path, path]
    return [*words, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORK, "--"]


@cache
def visible() -> list[str]:
    """Return the files and folders that the program may read; none is inside another."""
    wanted = [path for path in (*SYSTEM, *SETTINGS) if os.path.exists(path)]
    for prefix in {sys.prefix, sys.exec_prefix, sys.base_prefix, str(Path(sys.executable).resolve().parents[1])}:
        wanted += of_python(Path(prefix))
    wanted += [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    wanted += [*site.getsitepackages(), *library_folders()]
    outermost: list[str] = []
    for path in sorted({os.path.abspath(path) for path in wanted if os.path.exists(path)} - {"/"}):
        if not any(Path(path).is_relative_to(folder) for folder in outermost):
            outermost.append(path)
    return outermost


def of_python(prefix: Path) -> list[str]:
    """Return what a program needs of the folder in which a Python is installed: its parts if the home is in there."""
    home = Path(os.path.expanduser("~"))  # Path.home() fails where there is none
    if not home.resolve().is_relative_to(prefix.resolve()):
        return [str(prefix)]
    return [str(prefix / part) for part in ("bin", "lib", "lib64", "pyvenv.cfg") if (prefix / part).exists()]


def library_folders() -> list[str]:
    """Return the folders of the shared libraries that this process has loaded: some Pythons have them elsewhere."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    files = {Path(line.split(maxsplit=5)[5]) for line in lines if ".so" in line and line.count("/")}
    return [str(file.parent) for file in files if file.parent.name.startswith("lib")]
