"""What a replica's branch ranks say to each other: one all-gather a step, a broadcast when a block is committed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch.distributed as dist
from torch import Tensor


@dataclass
class Traffic:
    """Bytes this rank handed to each collective, and seconds spent inside."""

    bytes: dict[str, int] = field(default_factory=lambda: {"all_gather": 0, "commit": 0})
    seconds: dict[str, float] = field(default_factory=lambda: {"all_gather": 0.0, "commit": 0.0})

    @contextmanager
    def count(self, what: str, tensor: Tensor, sent: bool = True) -> Iterator[None]:
        """Count a collective around its call; `sent` is whether this rank gave the data."""
        began = time.perf_counter()
        yield
        self.bytes[what] += sent * tensor.numel() * tensor.element_size()
        self.seconds[what] += time.perf_counter() - began


class Communicator(Protocol):
    """A group of ranks that run the branches of the same sequences."""

    rank: int
    size: int
    traffic: Traffic

    def all_gather(self, records: Tensor) -> Tensor:
        """``[...]`` of every rank -> ``[size, ...]``."""

    def broadcast(self, buffer: Tensor, source: int) -> Tensor:
        """`source`'s buffer on every rank, in place."""


class PeerFailure(RuntimeError):
    """Another branch rank's forward failed in this step."""


class Solo:
    """One rank: nothing is sent."""

    def __init__(self) -> None:
        self.rank, self.size, self.traffic = 0, 1, Traffic()

    def all_gather(self, records: Tensor) -> Tensor:
        return records[None]

    def broadcast(self, buffer: Tensor, source: int) -> Tensor:
        return buffer


class TorchCommunicator:
    """torch.distributed: NCCL for tensors on GPUs, Gloo on CPUs."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size, self.traffic = dist.get_rank(group), dist.get_world_size(group), Traffic()

    def all_gather(self, records: Tensor) -> Tensor:
        gathered = records.new_empty(self.size, *records.shape)
        with self.traffic.count("all_gather", records):
            # the list form is the one that every supported torch has without a deprecation warning
            dist.all_gather(list(gathered.unbind(0)), records.contiguous(), group=self.group)
        return gathered

    def broadcast(self, buffer: Tensor, source: int) -> Tensor:
        with self.traffic.count("commit", buffer, sent=self.rank == source):
            dist.broadcast(buffer, group=self.group, group_src=source)
        return buffer
