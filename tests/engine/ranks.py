"""Ranks as threads: a communicator whose collectives are list look-ups between barriers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from lopa_dist.parallel.communicator import Communicator, Traffic

T = TypeVar("T")


class ThreadRank:
    """One of `size` communicators that share a board."""

    def __init__(self, rank: int, size: int, board: list[Tensor | None], gate: threading.Barrier) -> None:
        self.rank, self.size, self.board, self.gate, self.traffic = rank, size, board, gate, Traffic()

    def exchange(self, tensor: Tensor) -> list[Tensor]:
        self.board[self.rank] = tensor
        self.gate.wait(60)
        everything = [t.clone() for t in self.board if t is not None]
        self.gate.wait(60)
        return everything

    def all_gather(self, records: Tensor) -> Tensor:
        self.traffic.count("all_gather", records)
        return torch.stack(self.exchange(records))

    def broadcast(self, buffer: Tensor, source: int, counted: bool = True) -> Tensor:
        if counted and self.rank == source:
            self.traffic.count("commit", buffer)
        return buffer.copy_(self.exchange(buffer)[source])


def on_ranks(size: int, work: Callable[[Communicator], T]) -> list[T]:
    """Run `work` on every rank and return what each returned."""
    board: list[Tensor | None] = [None] * size
    gate = threading.Barrier(size)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def start(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            results[rank] = work(ThreadRank(rank, size, board, gate))
        except BaseException as error:
            errors.append(error)
            gate.abort()

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[r] for r in range(size)]
