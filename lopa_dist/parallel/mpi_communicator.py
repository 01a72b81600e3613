"""The same two collectives over MPI, for jobs started by mpirun.

Buffers go to MPI as they are (mpi4py's buffer protocol; no pickling). Tensors on a GPU need an MPI that is CUDA-aware.
Calls are non-blocking and watched, because MPI itself has no timeout.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from lopa_dist.parallel.communicator import Traffic


class MpiCommunicator:
    """`comm` is an mpi4py communicator of the branch group."""

    def __init__(self, comm: Any, timeout_s: float) -> None:
        self.comm, self.timeout_s = comm, timeout_s
        self.rank, self.size, self.traffic = comm.Get_rank(), comm.Get_size(), Traffic()

    def all_gather(self, records: Tensor) -> Tensor:
        records = records.contiguous()
        gathered = records.new_empty(self.size, *records.shape)
        self._wait(self.comm.Iallgather(as_bytes(records), as_bytes(gathered)))
        self.traffic.count("all_gather", records)
        return gathered

    def broadcast(self, buffer: Tensor, source: int, counted: bool = True) -> Tensor:
        self._wait(self.comm.Ibcast(as_bytes(buffer), source))
        if counted and self.rank == source:
            self.traffic.count("commit", buffer)
        return buffer

    def _wait(self, request: Any) -> None:
        began = time.monotonic()
        while not request.Test():
            if time.monotonic() - began > self.timeout_s:
                raise TimeoutError(f"no answer within {self.timeout_s:g} s")


def as_bytes(tensor: Tensor) -> Any:
    """What mpi4py sends: the tensor's memory, without a copy."""
    flat = tensor.view(-1).view(dtype=torch.uint8)
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)  # MPI knows nothing of streams
        return flat  # through __cuda_array_interface__
    return flat.numpy()
