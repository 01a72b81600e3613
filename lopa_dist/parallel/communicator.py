"""What a replica's branch ranks say to each other: one all-gather a step, a broadcast when a block is committed."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

import torch.distributed as dist
from torch import Tensor


@dataclass
class Traffic:
    """Bytes this rank handed to each collective, and seconds spent inside."""

    bytes: dict[str, int] = field(default_factory=lambda: {"all_gather": 0, "commit": 0})
    seconds: dict[str, float] = field(default_factory=lambda: {"all_gather": 0.0, "commit": 0.0})


class Communicator(Protocol):
    """A group of ranks that run the branches of the same sequences."""

    rank: int
    size: int
    traffic: Traffic

    def all_gather(self, records: Tensor) -> Tensor:
        """``[...]`` of every rank -> ``[size, ...]``."""

    def broadcast(self, buffer: Tensor, source: int) -> Tensor:
        """`source`'s buffer on every rank, in place."""

    def barrier(self) -> None:
        """Wait for all ranks."""

    def close(self) -> None:
        """Leave the group."""


class Solo:
    """One rank: nothing is sent."""

    def __init__(self) -> None:
        self.rank, self.size, self.traffic = 0, 1, Traffic()

    def all_gather(self, records: Tensor) -> Tensor:
        return records[None]

    def broadcast(self, buffer: Tensor, source: int) -> Tensor:
        return buffer

    def barrier(self) -> None:
        return

    def close(self) -> None:
        return


class TorchCommunicator:
    """torch.distributed: NCCL for tensors on GPUs, Gloo on CPUs. Expects an initialised process group."""

    def __init__(self) -> None:
        self.rank, self.size, self.traffic = dist.get_rank(), dist.get_world_size(), Traffic()

    def all_gather(self, records: Tensor) -> Tensor:
        began = time.perf_counter()
        gathered = records.new_empty(self.size, *records.shape)
        # the list form is the one that every supported torch has without a deprecation warning
        dist.all_gather(list(gathered.unbind(0)), records.contiguous())
        self._count("all_gather", records, began)
        return gathered

    def broadcast(self, buffer: Tensor, source: int) -> Tensor:
        began = time.perf_counter()
        dist.broadcast(buffer, source)
        self._count("commit", buffer, began)
        return buffer

    def barrier(self) -> None:
        dist.barrier()

    def close(self) -> None:
        dist.destroy_process_group()

    def _count(self, what: str, tensor: Tensor, began: float) -> None:
        self.traffic.bytes[what] += tensor.numel() * tensor.element_size()
        self.traffic.seconds[what] += time.perf_counter() - began
