"""Communication among the ranks of one group.

A branch group makes one all-gather per step, and a broadcast when a block is committed. A tensor group makes the
all-gathers inside the forward (`models.tensor_parallel`).
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lopa_dist.parallel.launcher import LaunchError


class Communicator(Protocol):
    """A group of ranks, in the order of their coordinates on one axis of the mesh."""

    rank: int
    size: int
    traffic: dict[str, int]  # bytes that this rank sent, by kind of collective: all_gather, commit

    def all_gather(self, records: Tensor) -> Tensor:
        """Return ``[...]`` of every rank as ``[size, ...]``."""

    def broadcast(self, buffer: Tensor, source: int, counted: bool = True) -> Tensor:
        """Return `source`'s buffer on every rank, in place; `counted`: count it as commit traffic."""

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of all ranks' values, on every rank."""


def nothing_sent() -> dict[str, int]:
    """Return the traffic of a communicator that has not been used yet."""
    return {"all_gather": 0, "commit": 0}


class PeerFailure(RuntimeError):
    """Another branch rank's forward failed in this step."""


class Solo:
    """A group of one rank: nothing is sent."""

    def __init__(self) -> None:
        self.rank, self.size, self.traffic = 0, 1, nothing_sent()

    def all_gather(self, records: Tensor) -> Tensor:
        return records[None]

    def broadcast(self, buffer: Tensor, source: int, counted: bool = True) -> Tensor:
        return buffer

    def sum(self, values: Tensor) -> Tensor:
        return values


class Relay:
    """A tensor group that a model keeps while it is loaded, and that forwards to the communicator of the moment."""

    def __init__(self, comm: Communicator) -> None:
        self.connect(comm)

    def connect(self, comm: Communicator) -> None:
        """Forward to `comm` from now on."""
        self.comm = comm
        self.rank, self.size, self.traffic = comm.rank, comm.size, comm.traffic

    def all_gather(self, records: Tensor) -> Tensor:
        return self.comm.all_gather(records)

    def broadcast(self, buffer: Tensor, source: int, counted: bool = True) -> Tensor:
        return self.comm.broadcast(buffer, source, counted)

    def sum(self, values: Tensor) -> Tensor:
        return self.comm.sum(values)


# torch 2.13 introduced the first name. It gathers into one tensor; for a list, NCCL would copy from its own tensor.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TorchCommunicator:
    """torch.distributed: NCCL for tensors on GPUs, Gloo on CPUs. For Gloo, tensors on a GPU go through the host."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.by_host = group, dist.get_backend(group) == "gloo"
        self.rank, self.size, self.traffic = dist.get_rank(group), dist.get_world_size(group), nothing_sent()

    def all_gather(self, records: Tensor) -> Tensor:
        given = records.cpu() if self.by_host else records
        gathered = given.new_empty(self.size, *given.shape)
        all_gather(gathered.view(-1), given.reshape(-1), group=self.group)
        self.traffic["all_gather"] += records.nbytes
        return gathered.to(records.device)

    def broadcast(self, buffer: Tensor, source: int, counted: bool = True) -> Tensor:
        given = buffer.cpu() if self.by_host else buffer
        dist.broadcast(given, group=self.group, group_src=source)
        if given is not buffer:
            buffer.copy_(given)
        if counted and self.rank == source:
            self.traffic["commit"] += buffer.nbytes
        return buffer

    def sum(self, values: Tensor) -> Tensor:
        total = values.to("cpu" if self.by_host else values.device, copy=True)
        dist.all_reduce(total, group=self.group)
        return total.to(values.device)


made_here: Any = None  # torch's default process group, if it was made here


def make_default_group(backend: str, store: Any, rank: int, size: int, timeout: timedelta) -> None:
    """Make torch's default process group, after the end of that of an earlier meeting that ended with an error."""
    global made_here
    end_default_group()
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    made_here = dist.group.WORLD


def end_default_group() -> None:
    """End torch's default process group and all of its parts, if it was made here."""
    global made_here
    if made_here is not None and dist.is_initialized() and dist.group.WORLD is made_here:
        dist.destroy_process_group()
    made_here = None


def refuse_other_group() -> None:
    """Raise a LaunchError if the program has a default process group of its own: there can be only one."""
    if dist.is_initialized() and dist.group.WORLD is not made_here:
        raise LaunchError(
            "this program has a default process group of torch.distributed, and ranks can be joined by only one: call "
            "torch.distributed.destroy_process_group() first"
        )


class MpiCommunicator:
    """MPI, for jobs started by mpirun; `comm` is the group's mpi4py communicator.

    Buffers go to MPI as they are (mpi4py's buffer protocol; no pickling). Tensors on a GPU need a CUDA-aware MPI. Calls
    are non-blocking and polled, because MPI itself has no timeout.
    """

    def __init__(self, comm: Any, timeout_s: float) -> None:
        self.comm, self.timeout_s = comm, timeout_s
        self.rank, self.size, self.traffic = comm.Get_rank(), comm.Get_size(), nothing_sent()

    def all_gather(self, records: Tensor) -> Tensor:
        records = records.contiguous()
        gathered = records.new_empty(self.size, *records.shape)
        self._wait(self.comm.Iallgather(as_bytes(records), as_bytes(gathered)))
        self.traffic["all_gather"] += records.nbytes
        return gathered

    def broadcast(self, buffer: Tensor, source: int, counted: bool = True) -> Tensor:
        self._wait(self.comm.Ibcast(as_bytes(buffer), source))
        if counted and self.rank == source:
            self.traffic["commit"] += buffer.nbytes
        return buffer

    def sum(self, values: Tensor) -> Tensor:
        own = values.cpu().contiguous()
        total = torch.empty_like(own)
        self._wait(self.comm.Iallreduce(own.numpy(), total.numpy()))
        return total.to(values.device)

    def _wait(self, request: Any) -> None:
        began = time.monotonic()
        while not request.Test():
            if time.monotonic() - began > self.timeout_s:
                raise TimeoutError(f"no answer within {self.timeout_s:g} s")


def as_bytes(tensor: Tensor) -> Any:
    """Return a tensor's memory, without a copy, as mpi4py sends it."""
    flat = tensor.view(-1).view(dtype=torch.uint8)
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)  # MPI does not know about streams
        return flat  # through __cuda_array_interface__
    return flat.numpy()
