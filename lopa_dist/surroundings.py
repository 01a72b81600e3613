"""Protects calls of an `LLM` from what the program around it has set in torch, and restores these settings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache

import torch


@contextmanager
def undisturbed(threads: int) -> Iterator[None]:
    """Enclose what computes: neither the program's default device nor its autocast has an effect on it.

    Args:
        threads: with how many threads the block computes on a CPU, unless the process is forked: then with one.
    """
    with ExitStack() as stack:
        stack.callback(compute_with, torch.get_num_threads())
        compute_with(1 if forked() else threads)
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))  # not always, because it slows down each of torch's functions
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def compute_with(threads: int) -> None:
    """Set with how many threads the calling thread computes.

    torch's function also sets it for threads that begin later, so these get back what they had.
    """
    if threads == torch.get_num_threads():
        return
    with ThreadPoolExecutor(1) as new:
        usual = new.submit(torch.get_num_threads).result()
        torch.set_num_threads(threads)
        new.submit(torch.set_num_threads, usual).result()


def forked() -> bool:
    """Return whether this process was forked from one that had called this function, and so may have computed.

    A fork copies only the thread that forks. If torch used several threads, it would wait for the others forever.
    """
    return first_process() != os.getpid()


@cache
def first_process() -> int:
    """Return the id of the process that asked first; processes that are forked from it compute with one thread."""
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
    return os.getpid()
