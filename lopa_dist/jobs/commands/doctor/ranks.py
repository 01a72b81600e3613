"""Checks of the ranks that a job would have: how they were started, and whether they reach each other."""

from __future__ import annotations

import statistics
import time
from threading import Thread

import torch

from lopa_dist.jobs.commands.doctor.finding import Finding, Machine, State, broken, fine
from lopa_dist.jobs.setup.resolve import choose_dtype
from lopa_dist.kernels.native import form
from lopa_dist.parallel.group import Group
from lopa_dist.parallel.launcher import LaunchError, detect
from lopa_dist.parallel.mesh import Mesh, choose_mesh
from lopa_dist.parallel.stop import Stop

JOIN_S = 30.0  # seconds within which the ranks must have met and answered
UNLIKE = (
    "operations run in the form {} on this rank, and in another on rank 0, which ends a job: a C compiler on every "
    "machine, or engine.kernels=torch"
)
ROUNDS, SENT = 5, 4096  # rounds of collectives, and numbers that each rank sends in one


def ranks(machine: Machine) -> Finding:
    """Return how the doctor was started, as a job would be, and whether `parallel` fits that."""
    world, parallel = detect(), machine.config.parallel
    axes = parallel.data, parallel.branch, parallel.tensor
    try:
        choose_mesh(*axes, world.size, world.size, machine.config.decode.max_branches)
    except LaunchError as error:  # in one process, the job itself may be started with more
        return fine(f"one process; {error}") if world.size == 1 else Finding(State.BROKEN, f"{error}")
    if world.size == 1:
        return fine("one process; torchrun, srun and mpirun start more")
    return fine(f"rank {world.rank} of {world.size}, by {world.launcher}")


def collectives(machine: Machine) -> Finding:
    """Return whether ranks receive what others send, and how long that takes."""
    world = detect()
    if world.size == 1:
        return fine("one process has none")
    if machine.device.type == "cuda":
        torch.cuda.set_device(machine.device)
    parallel = machine.config.parallel
    # which may have to be compiled
    own = form(machine.device, choose_dtype(machine.config.model, machine.device), machine.config.engine.kernels)
    findings: list[Finding] = []

    def join() -> None:
        try:
            machine.group = Group(
                world, Mesh(1, world.size), parallel.backend, JOIN_S, machine.device, Stop(machine.config.job.grace_s)
            )
            found = exchange(machine.group, machine.device)
            alike = found.state == State.BROKEN or machine.group.store.broadcast("doctor", own) == own
            findings.append(found if alike else Finding(State.BROKEN, UNLIKE.format(own)))
        except (RuntimeError, ValueError, TimeoutError) as error:
            findings.append(Finding(State.BROKEN, f"{error}"))

    joining = Thread(target=join, daemon=True)  # the ranks of a job may wait for each other for minutes
    joining.start()
    joining.join(JOIN_S)
    if not findings:
        return broken(
            f"the {world.size} ranks did not meet, or did not answer, within {JOIN_S:.0f} s",
            "see whether all of them were started, and whether a firewall is between their machines; for NCCL, "
            "NCCL_SOCKET_IFNAME names the network, and NCCL_DEBUG=INFO says more",
        )
    return findings[0]


def exchange(group: Group, device: torch.device) -> Finding:
    """Return whether numbers arrive that the ranks of a group gather and broadcast, and how long a gather takes."""
    comm, times = group.comm, []
    ranks = torch.arange(comm.size, dtype=torch.int32, device=device)
    for number in range(ROUNDS):
        began = time.perf_counter()
        gathered = comm.all_gather(torch.full((SENT,), comm.rank + number, dtype=torch.int32, device=device))
        right = bool((gathered == (ranks + number)[:, None]).all())  # waits for the device
        times.append(time.perf_counter() - began)
        last = comm.broadcast(torch.full((SENT,), comm.rank, dtype=torch.int64, device=device), comm.size - 1)
        if not (right and bool((last == comm.size - 1).all())):
            return broken(
                f"{group.backend}: what ranks get is not what others sent",
                "another parallel.backend; for NCCL, NCCL_P2P_DISABLE=1 or NCCL_IB_DISABLE=1 shows which link fails",
            )
    took = 1000 * statistics.median(times)
    return fine(f"{group.backend} joins {comm.size} ranks; {SENT * 4 >> 10} KiB from each take {took:.2f} ms")


def broken_everywhere(machine: Machine, count: int) -> int:
    """Return how many things are broken on all ranks together; if they are not joined, `count`, those on this rank.

    All ranks then leave the group together: a rank that ended earlier, with open connections, could make others fail.
    """
    if machine.group is None:
        return count
    try:
        found = machine.group.store.sum({"broken": count})["broken"]
        machine.group.failures.leave()
        return found
    except (RuntimeError, TimeoutError):
        return count + 1  # another rank is lost
