"""Requests during which a process ended: they run again one at a time, and those that end it again are set aside.

A replica records which requests begin and end in a file, which it removes when it ends in order: when all is done, when
it was asked to stop, or when another replica failed. If the file is still there, its requests that began but did not
end were running when the process crashed, and one of them may have been the reason.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lopa_dist.jobs.folder.packed import RequestIds
from lopa_dist.own_code import own_line
from lopa_dist.parallel.launcher import RankError
from lopa_dist.parallel.stop import Stopped

SUFFIX = ".begun"
IN_ORDER = (Stopped, KeyboardInterrupt, OSError, ValueError)  # no request is to blame for these


class Begun(AbstractContextManager["Begun"]):
    """The file of one replica's attempt: a request's id when it begins, and the id with a minus before it when it ends.

    The file remains only if a request may be the reason why the attempt ended.

    Args:
        journal: its folder.
        attempt, replica: their numbers.
        lone: whether the replica is a single rank, so that a lost rank is always another replica's.
    """

    def __init__(self, journal: Path, attempt: int, replica: int, lone: bool) -> None:
        self.path, self.lone = journal / f"{attempt:03d}-{replica}{SUFFIX}", lone
        self.file = self.path.open("w", encoding="ascii")
        self.open = 0  # requests that have begun and not ended

    def note(self, *names: str | None, ended: bool = False) -> None:
        """Record that requests begin or have `ended`, without a sync: the file need not survive the machine."""
        self.open += -len(names) if ended else len(names)
        self.file.writelines(f"{'-' if ended else ''}{name}\n" for name in names)
        self.file.flush()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.file.close()
        of_another_rank = isinstance(error, RankError) and self.lone
        of_the_user = isinstance(error, Exception) and of_own_code(error)
        if error is None or isinstance(error, IN_ORDER) or of_another_rank or of_the_user:
            self.forget()

    def forget(self) -> None:
        """Remove the file: no request is to blame for the end of the attempt."""
        self.path.unlink(missing_ok=True)


def of_own_code(error: BaseException) -> bool:
    """Return whether an error, or one that it was raised from, arose in the user's own code."""
    return bool(own_line(error)) or (error.__cause__ is not None and of_own_code(error.__cause__))


def too_often(crashes: bytearray, most: int | None) -> NDArray[np.bool_]:
    """Return for each request whether the process ended at least `most` times while it ran; None: never too often."""
    counts = np.array(crashes, int)
    return counts >= most if most is not None else np.zeros(len(counts), bool)


def crashes(journal: Path, ids: RequestIds, done: bytearray, since: int) -> bytearray:
    """Return for each request in how many attempts from `since` on the process ended while it ran; 0 if it is done."""
    counts, left = np.zeros(len(ids), np.uint8), ~np.array(done, bool)
    for file in journal.glob(f"*{SUFFIX}"):
        if int(file.name.split("-")[0]) >= since:
            names = {*file.read_text(encoding="ascii").split("\n")[:-1]}
            indices = ids.find([name for name in names if name and f"-{name}" not in names])
            counts[[index for index in indices.tolist() if index >= 0 and left[index]]] += 1
    return bytearray(counts.tobytes())
