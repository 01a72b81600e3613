"""Ranks as threads: a communicator whose collectives are list look-ups between barriers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from lopa_dist.parallel.communicator import Communicator, nothing_sent

T = TypeVar("T")


class ThreadRank:
    """One of `size` communicators that share a board."""

    def __init__(self, rank: int, size: int, board: list[Tensor | None], gate: threading.Barrier) -> None:
        self.rank, self.size, self.board, self.gate, self.traffic = rank, size, board, gate, nothing_sent()

    def exchange(self, tensor: Tensor) -> list[Tensor]:
        self.board[self.rank] = tensor
        self.gate.wait(60)
        everything = [t.clone() for t in self.board if t is not None]
        self.gate.wait(60)
        return everything

    def all_gather(self, records: Tensor) -> Tensor:
        self.traffic["all_gather"] += records.nbytes
        return torch.stack(self.exchange(records))

    def broadcast(self, buffer: Tensor, source: int, counted: bool = True) -> Tensor:
        if counted and self.rank == source:
            self.traffic["commit"] += buffer.nbytes
        return buffer.copy_(self.exchange(buffer)[source])

    def sum(self, values: Tensor) -> Tensor:
        return torch.stack(self.exchange(values)).sum(0)


def on_ranks(size: int, work: Callable[[Communicator], T]) -> list[T]:
    """Run `work` on every rank of a branch group and return what each returned."""
    return on_mesh(size, 1, lambda comm, tensor: work(comm))


def on_mesh(branch: int, tensor: int, work: Callable[[Communicator, Communicator], T]) -> list[T]:
    """Run `work(branch group, tensor group)` on every rank of branch x tensor and return what each returned."""
    coordinates = [(b, t) for b in range(branch) for t in range(tensor)]
    branches = [group(branch) for _ in range(tensor)]
    tensors = [group(tensor) for _ in range(branch)]
    results: dict[tuple[int, int], T] = {}
    errors: list[BaseException] = []

    def start(b: int, t: int) -> None:
        torch.set_num_threads(1)
        try:
            results[b, t] = work(branches[t][b], tensors[b][t])
        except BaseException as error:
            errors.append(error)
            for rank in (*branches[t], *tensors[b]):
                rank.gate.abort()

    threads = [threading.Thread(target=start, args=one) for one in coordinates]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[one] for one in coordinates]


def group(size: int) -> list[ThreadRank]:
    """Communicators of one group."""
    board: list[Tensor | None] = [None] * size
    gate = threading.Barrier(size)
    return [ThreadRank(rank, size, board, gate) for rank in range(size)]
