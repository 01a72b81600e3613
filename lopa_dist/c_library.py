"""C code that belongs to a Python file: compiled for this machine when first needed, and kept in the user's cache."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

from numpy.typing import NDArray

from lopa_dist.atomic import can_be_written

# so that no operation is contracted or reordered, whatever the compiler's defaults are
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared")
COMPILE_S = 120
DIGEST = hashlib.sha256().digest_size
REMEDY = "apt install gcc; if you have gcc, set XDG_CACHE_HOME=FOLDER to a writable folder that is not mounted noexec"
P, N, F, DOUBLE, INT, LONG = (
    ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_float, ctypes.c_double, ctypes.c_int, ctypes.c_int64,
)  # fmt: skip
MEMORY = ctypes.c_char * 0  # of any size; C code knows how many numbers there are
Function = tuple[Any, Sequence[Any]]
"""The types of what a C function returns and of its arguments."""


def memory(array: NDArray[Any]) -> ctypes.Array[ctypes.c_char]:
    """Return an array as an argument of a C function: twice as fast as `array.ctypes.data`, of which a step needs many.

    Raises:
        TypeError: its numbers are not consecutive, or must not be written to.
    """
    return MEMORY.from_buffer(array)  # type: ignore[arg-type, unused-ignore]  # numpy's arrays are buffers


class Unavailable(Exception):
    """Why code in C cannot run here."""


def c_compiler() -> str | None:
    """Return the path of the C compiler, the one that `CC` names if it is there; None: there is none."""
    return shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")


@cache
def version_of(compiler: str) -> str:
    """Return what `compiler` prints about its version."""
    return run_compiler(compiler, "--version").stdout


def run_compiler(*command: str) -> subprocess.CompletedProcess[str]:
    """Return what a compiler did and said. It may speak in bytes that are not UTF-8, which are replaced."""
    return subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=COMPILE_S)


@cache
def cpu() -> str:
    """Return a text that identifies this machine's kind of CPU: code must be compiled anew for any other kind."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    kinds = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(kinds)})) or platform.processor()


def user_cache() -> Path:
    """Return the folder for compiled code in the user's cache, or without a home a temporary one; it need not exist."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lopa_dist"
    except RuntimeError:  # neither HOME nor the system says where the home is
        return temporary()


def temporary() -> Path:
    """Return the folder for this user's compiled code among temporary files, which need not exist."""
    return Path(gettempdir()) / f"lopa_dist-{os.getuid()}"


def writable(folder: Path) -> Path:
    """Return `folder`, made if need be, or a folder in the temporary directory if `folder` is not this user's own.

    Raises:
        Unavailable: other users could put their code into the folder in the temporary directory, too.
    """
    if can_be_written(folder):
        entry = folder.stat()
        if entry.st_uid == os.getuid() and entry.st_mode & 0o022:
            folder.chmod(stat.S_IMODE(entry.st_mode) & ~0o022)
        if is_own(folder):
            return folder
    own = temporary()
    own.mkdir(mode=0o700, exist_ok=True)
    if own.is_symlink() or not is_own(own):
        raise Unavailable(f"{folder} cannot be written, or is another user's, and {own} is not this user's alone")
    return own


def is_own(folder: Path) -> bool:
    """Return whether `folder` is a folder into which no other user than root can put code that then runs here."""
    try:
        entry = folder.stat()
    except OSError:
        return False
    return stat.S_ISDIR(entry.st_mode) and entry.st_uid in (os.getuid(), 0) and not entry.st_mode & 0o022


def intact(path: Path) -> bool:
    """Return whether a compiled library is complete and of this user: a disk may have been full, or a copy cut short.

    Its last bytes are a digest of the others (`seal`). A library that was cut short could end the process.
    """
    try:
        made, owner = path.read_bytes(), path.stat().st_uid
    except OSError:
        return False
    whole = hashlib.sha256(made[:-DIGEST]).digest() == made[-DIGEST:]
    return whole and owner in (os.getuid(), 0)


def seal(path: Path) -> None:
    """Append a digest of a library to it, which loading it ignores."""
    with path.open("ab") as file:
        file.write(hashlib.sha256(path.read_bytes()).digest())


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Let only one process of this machine at a time into the context for `folder`; the others wait.

    They wait for at most `COMPILE_S`, since the one inside may be suspended, and then enter all the same.
    """
    descriptor, end = os.open(folder, os.O_RDONLY), time.monotonic() + COMPILE_S
    try:
        while time.monotonic() < end:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:  # a file system without locks
                break
        yield
    finally:
        os.close(descriptor)


def compiled(source: Path, *defined: str) -> Path:
    """Return the library of `source` with the macros `defined` for this CPU; compile it unless that was done before.

    Raises:
        Unavailable: there is no compiler, or it fails.
    """
    compiler = c_compiler()
    if compiler is None:
        raise Unavailable("there is no C compiler")
    try:
        flags = [*FLAGS, *(f"-D{macro}" for macro in defined)]
        of = "\n".join([source.read_text(encoding="utf-8"), *flags, version_of(compiler), cpu()])
        name = "-".join([source.stem, *defined, hashlib.sha256(of.encode()).hexdigest()[:16]])
        path = user_cache() / f"{name.lower()}.so"
        if is_own(path.parent) and intact(path):
            return path
        path = writable(path.parent) / path.name
        # other machines may compile it now, too
        with exclusive(path.parent), TemporaryDirectory(dir=path.parent) as own:
            if intact(path):
                return path
            made = Path(own) / path.name
            run = run_compiler(compiler, *flags, "-o", str(made), str(source), "-lm")
            if run.returncode:
                raise Unavailable(f"{compiler} fails: {(run.stderr.strip().splitlines() or ['without a word'])[0]}")
            seal(made)
            made.replace(path)
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(str(error)) from error
    return path


def load_or_why(source: Path, functions: Mapping[str, Function]) -> ctypes.CDLL | str:
    """Return the library of `source` as `load` does, or why there is none."""
    try:
        return load(source, functions)
    except Unavailable as error:
        return str(error)


def load(source: Path, functions: Mapping[str, Function], *defined: str) -> ctypes.CDLL:
    """Return the library of `source`, with the macros `defined`, after setting the types of its `functions`.

    Raises:
        Unavailable: it cannot be compiled or loaded.
    """
    path = compiled(source, *defined)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise Unavailable(str(error)) from error
    for name, (result, arguments) in functions.items():
        function = getattr(library, name, None)
        if function is None:
            raise Unavailable(f"{path} has no {name}; delete it")
        function.restype, function.argtypes = result, arguments
    return library
