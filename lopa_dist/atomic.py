"""Files that are complete or not there, even if their writer is killed, and errors that say which file failed."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Add the name of `file` to errors of writing it: the system does not say where a disk is full."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(file)
        raise


@contextmanager
def atomic(file: Path, hidden: bool = False) -> Iterator[Path]:
    """Yield a temporary file to write to; on success it is synced to disk and renamed to `file`.

    If writing fails, `file` remains as it was. What a kill leaves behind is overwritten by the next attempt. If
    others read all files of the folder, set `hidden`, which begins the temporary file's name with a dot.
    """
    partial = file.with_name(f"{'.' * hidden}{file.name}.partial")
    try:
        with naming(file):
            yield partial
            with partial.open("rb") as written:
                os.fsync(written.fileno())
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    partial.replace(file)


def write_lines(file: Path, lines: Iterable[str]) -> None:
    """Write `lines`, which include their line ends, to a `file` that is complete or not there (`atomic`)."""
    with atomic(file) as partial, partial.open("w", encoding="utf-8") as out:
        out.writelines(lines)


def check_writable(folder: Path) -> None:
    """Raise an OSError unless files can be made in `folder`, or where it does not exist yet, in its nearest parent.

    This is tried, because permissions do not tell: not even root can write into /proc.
    """
    folder = folder.absolute()
    there = next(place for place in (folder, *folder.parents) if place.exists() or place.is_symlink())
    try:
        with TemporaryFile(dir=there):
            pass
    except OSError as error:
        error.filename = str(there)
        raise


def can_be_written(folder: Path) -> bool:
    """Return whether files can be made in `folder`, which is made if need be."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        check_writable(folder)
        return True
    return False


def no_room(error: OSError, then: str) -> str:
    """Return a message about a full disk or a used-up quota that says what to do `then`; empty for other errors."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    where = f" in {Path(error.filename).parent}" if error.filename else ""
    return f"{error.strerror}{where}: make room there, then {then}; finished requests are kept"
