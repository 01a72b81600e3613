"""What every communicator must do: the engine relies on no more. `check` is run on all ranks of a group at once.

`torchrun|mpirun ... -m tests.parallel.contract` checks the communicator of that launcher between real processes.
"""

from __future__ import annotations

import os
import sys
import time

import pytest
import torch
from torch import Tensor

from lopa_dist.parallel.communicator import Communicator
from lopa_dist.parallel.failures import broken
from lopa_dist.parallel.group import Group
from lopa_dist.parallel.launcher import detect
from lopa_dist.parallel.mesh import Mesh
from lopa_dist.parallel.stop import Stop

TIMEOUT_S = 2.0


def own(rank: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """What a rank gives: different on every rank and at every place."""
    size = torch.Size(shape).numel()
    return (torch.arange(size).view(shape) + 100 * rank).to(dtype)


def check(comm: Communicator) -> None:
    assert 0 <= comm.rank < comm.size
    gathers_in_rank_order(comm)
    broadcasts_in_place(comm)
    adds_up(comm)
    counts_what_it_gives(comm)


def gathers_in_rank_order(comm: Communicator) -> None:
    kept = []
    for dtype in (torch.int32, torch.int64, torch.float32, torch.bfloat16):
        for shape in ((1,), (3, 5), (2, 7, 3), (0, 3), (50_000,)):
            mine = own(comm.rank, *shape, dtype=dtype)
            before = mine.clone()
            kept.append((comm.all_gather(mine), dtype, shape))
            assert torch.equal(mine, before)
    for gathered, dtype, shape in kept:  # looked at last: a later gather must not touch an earlier one's result
        assert gathered.shape == (comm.size, *shape)
        assert gathered.dtype == dtype
        assert torch.equal(gathered, torch.stack([own(rank, *shape, dtype=dtype) for rank in range(comm.size)]))
    turned = own(comm.rank, 4, 3).T  # not contiguous
    assert torch.equal(comm.all_gather(turned), torch.stack([own(rank, 4, 3).T for rank in range(comm.size)]))
    bits = torch.tensor([float("nan"), -0.0, float("inf")])
    assert torch.equal(comm.all_gather(bits)[-1].view(torch.int32), bits.view(torch.int32))


def adds_up(comm: Communicator) -> None:
    for dtype in (torch.float32, torch.float64):
        for shape in ((1,), (50_000,)):
            mine = own(comm.rank, *shape, dtype=dtype)
            total = comm.sum(mine)
            assert torch.equal(total, torch.stack([own(r, *shape, dtype=dtype) for r in range(comm.size)]).sum(0))
            assert torch.equal(mine, own(comm.rank, *shape, dtype=dtype))


def broadcasts_in_place(comm: Communicator) -> None:
    for source in range(comm.size):
        for dtype in (torch.int64, torch.float32, torch.bfloat16):
            buffer = own(comm.rank, 2, 3, 4, dtype=dtype)
            result = comm.broadcast(buffer, source)
            assert result.data_ptr() == buffer.data_ptr()
            assert torch.equal(buffer, own(source, 2, 3, 4, dtype=dtype))


def counts_what_it_gives(comm: Communicator) -> None:
    """A group of one gives nothing to anybody."""
    comm.traffic.update(all_gather=0, commit=0)
    comm.all_gather(own(comm.rank, 3, 5))
    comm.broadcast(own(comm.rank, 7, dtype=torch.int64), 0)
    comm.broadcast(own(comm.rank, 7, dtype=torch.int64), 0, counted=False)
    sends = comm.size > 1
    assert comm.traffic == {"all_gather": 60 * sends, "commit": 56 * (sends and comm.rank == 0)}


def gives_up_in_time(comm: Communicator) -> None:
    """Nobody answers rank 0, and its error is known for what it is."""
    if comm.rank:
        time.sleep(TIMEOUT_S + 4)
        return
    began = time.monotonic()
    with pytest.raises((RuntimeError, TimeoutError)) as caught:
        comm.all_gather(own(0, 3))
    assert broken(caught.value)
    assert TIMEOUT_S - 0.5 < time.monotonic() - began < TIMEOUT_S + 3


def main() -> None:
    world = detect()
    group = Group(world, Mesh(1, world.size), sys.argv[1], TIMEOUT_S, torch.device("cpu"), Stop(5))
    assert (group.backend, group.comm.size) == (sys.argv[1], world.size)
    check(group.comm)
    gives_up_in_time(group.comm)
    sys.stdout.write(f"rank {world.rank} kept the contract\n")
    sys.stdout.flush()
    group.failures.heart.close()
    time.sleep(8 if world.rank == 0 else 0)  # the store is rank 0's; and mpirun ends all ranks when the first has ended
    os._exit(0)  # a collective of its is still under way


if __name__ == "__main__":
    main()
