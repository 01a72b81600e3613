"""Remote files: any path that fsspec reads and writes, such as s3://bucket/prompts.jsonl."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from lopa_dist.checks import in_a_line

PROTOCOL = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)


def is_remote(path: str) -> bool:
    """Return whether a path names a remote file. ``hf://owner/name:split`` is a dataset, not a file."""
    protocol = PROTOCOL.match(path)
    return bool(protocol) and (not path.startswith("hf://") or path.startswith("hf://datasets/"))


def opened(path: str, key: str) -> tuple[Any, str]:
    """Return the file system of a path, and the path in it.

    Raises:
        ValueError: the file system's package is not installed, or refuses the path; the message names `key`.
    """
    import fsspec

    try:
        system, inside = fsspec.core.url_to_fs(path)
    except ImportError as error:
        extra = path.partition(":")[0]
        remedy = f": pip install 'lopa_dist[{extra}]'" if extra in ("s3", "gs") else ""
        raise ValueError(f"{key}={path}: {error}{remedy}") from error
    except Exception as error:  # packages raise whatever they like, for bad names or credentials
        raise ValueError(f"{key}={path}: {in_a_line(error)}") from error
    return system, str(inside)


def exists(path: str, key: str) -> bool:
    """Return whether the file exists; raise a ValueError that names `key` if that cannot be told."""
    system, inside = opened(path, key)
    try:
        return bool(system.exists(inside))
    except Exception as error:  # as above, and for networks
        raise ValueError(f"{key}={path}: cannot be reached ({in_a_line(error)})") from error


@contextmanager
def fetched(path: str, key: str) -> Iterator[Path]:
    """Yield a local copy of a remote file, with the same name, which is deleted afterwards.

    Raises:
        ValueError: it cannot be read; the message names `key`.
    """
    system, inside = opened(path, key)
    with TemporaryDirectory(prefix="lopa_dist-") as folder:
        copy = Path(folder, PurePosixPath(inside).name)
        try:
            system.get_file(inside, str(copy))
        except Exception as error:  # as above
            raise ValueError(f"{key}={path}: cannot be read ({in_a_line(error)})") from error
        yield copy


def put(file: Path, path: str, key: str) -> None:
    """Copy `file` to the remote `path`; raise a ValueError that names `key` if that fails."""
    system, inside = opened(path, key)
    try:
        system.put_file(str(file), inside)
    except Exception as error:  # as above
        raise ValueError(f"{key}={path}: cannot be written ({in_a_line(error)})") from error
