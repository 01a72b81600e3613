"""What the program around an `LLM` has set in torch: calls compute as if it had not, and leave it as it was."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache

import torch


@contextmanager
def undisturbed(threads: int | None = None) -> Iterator[None]:
    """Enclose what computes: neither the program's default device nor its autocast has an effect on it.

    At the end, torch's number of threads is the program's again.

    Args:
        threads: with how many the block computes on a CPU, but one in a forked process; None: as many as before.
    """
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        if threads is not None:
            torch.set_num_threads(1 if forked() else threads)
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))  # not always, because it slows down each of torch's functions
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def forked() -> bool:
    """Return whether this process was forked from one that had asked this before, and may have computed.

    A fork copies only the thread that forks. With more than one, torch would wait for the others forever.
    """
    return first_process() != os.getpid()


@cache
def first_process() -> int:
    """Return the id of the process that asked first; processes that are forked from it compute with one thread."""
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
    return os.getpid()
