"""A job's ranks, joined: the communicators of this rank's branch and tensor groups, and what all ranks share."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh

from lopa_dist import __version__
from lopa_dist.code_hash import code_hash
from lopa_dist.parallel import store_keys as keys
from lopa_dist.parallel.communicator import (
    Communicator,
    MpiCommunicator,
    Solo,
    TorchCommunicator,
    make_default_group,
    refuse_other_group,
)
from lopa_dist.parallel.counters import ProgressCounters, WorkQueue
from lopa_dist.parallel.failures import Failures, first_line
from lopa_dist.parallel.launcher import JOIN, LaunchError, World, mpi
from lopa_dist.parallel.mesh import Mesh
from lopa_dist.parallel.rendezvous import all_are_here, rendezvous
from lopa_dist.parallel.shared_store import SharedStore
from lopa_dist.parallel.stop import Stop

NCCL_GRACE_S = 30.0  # added to the timeout of NCCL's own watchdog, which aborts the process without saying who is lost


class Group:
    """The job as one of its ranks sees it; `with group.failures.guard():` encloses the work.

    Args:
        timeout_s: seconds that a collective may take before a rank counts as lost.
        meeting: number of earlier groups of these processes; it keeps their keys in the store apart.
        check_alive: called while this rank waits for the others, which then has no time limit; it may raise a
            RankError. None: ranks that do not join within the time limit for a start count as missing.

    Attributes:
        comm: the communicator of the branch group.
        tensor: the communicator of the tensor group.
        everyone: the communicator of all ranks.
        is_leader: whether this rank speaks for its replica.

    Raises:
        LaunchError: the ranks cannot be joined.
    """

    def __init__(
        self,
        world: World,
        mesh: Mesh,
        backend: str,
        timeout_s: float,
        device: torch.device,
        stop: Stop,
        meeting: int = 0,
        check_alive: Callable[[], None] | None = None,
    ) -> None:
        self.world, self.mesh, self.stop = world, mesh, stop
        self.data_rank, self.branch_rank, self.tensor_rank = mesh.coordinates(world.rank)
        self.is_leader = self.branch_rank == self.tensor_rank == 0
        self.backend = choose_backend(world, backend, device)
        self.device = device
        if self.backend in ("gloo", "nccl"):
            refuse_other_group()
        self.comm: Communicator = Solo()
        self.tensor: Communicator = Solo()
        self.everyone: Communicator = Solo()
        try:
            store = HashStore() if world.size == 1 else rendezvous(world, meeting=meeting)
            self.failures = Failures(store, world, mesh, self.backend, timeout_s, stop)
            self.store = SharedStore(store, world, self.failures)
            with self.failures.announcing():
                self.store.join(math.inf if check_alive else JOIN.total_seconds(), check_alive)
                all_are_here(world)
                self._agree()
                with self.failures.watched(False):  # MPI has no timeout
                    self._split(device, timeout_s)
        except BaseException as error:
            if hasattr(self, "failures"):
                self.failures.close()
            if isinstance(error, RuntimeError):
                raise LaunchError(f"rank {world.rank} could not join the others: {first_line(error)}") from error
            raise
        in_replica = partial(broadcast, self.comm, self.tensor, "cuda" if self.backend == "nccl" else "cpu")
        self.queue = WorkQueue(store, self.failures, mesh.data, self.is_leader, in_replica)
        self.progress = ProgressCounters(store, mesh.data, world.rank)

    def _agree(self) -> None:
        """Check that all ranks run the same code and would be joined in the same way, before they are joined."""
        mesh = self.mesh
        own = {
            "lopa_dist": f"{__version__} ({code_hash()})",
            "torch": torch.__version__,
            **packages(),
            "data x branch x tensor": f"{mesh.data} x {mesh.branch} x {mesh.tensor}",
            "parallel.backend": self.backend,
        }
        self.store.agree("group", own)

    def _split(self, device: torch.device, timeout_s: float) -> None:
        """Make the branch and tensor groups, and the group of all ranks."""
        world, mesh = self.world, self.mesh
        if self.backend == "mpi":
            branches, tensors = mpi_groups(mesh, world.rank)
            self.comm = MpiCommunicator(branches, timeout_s)
            self.everyone = MpiCommunicator(mpi().COMM_WORLD, timeout_s)
            if mesh.tensor > 1:
                self.tensor = MpiCommunicator(tensors, timeout_s)
        elif world.size > 1:
            timeout = timedelta(seconds=timeout_s + NCCL_GRACE_S * (self.backend == "nccl"))
            make_default_group(self.backend, self.failures.store, world.rank, world.size, timeout)
            kind = "cpu" if self.backend == "gloo" else device.type  # for Gloo, tensors on a GPU go through the host
            axes = init_device_mesh(
                kind, (mesh.data, mesh.branch, mesh.tensor), mesh_dim_names=("data", "branch", "tensor")
            )
            assert dist.group.WORLD is not None
            self.everyone = TorchCommunicator(dist.group.WORLD)
            if mesh.branch > 1:
                self.comm = TorchCommunicator(with_timeout(axes.get_group("branch"), timeout))
            if mesh.tensor > 1:
                self.tensor = TorchCommunicator(with_timeout(axes.get_group("tensor"), timeout))

    @property
    def traffic(self) -> dict[str, int]:
        """Return the bytes that this rank sent in the collectives of its branch group and of its tensor group."""
        return self.comm.traffic | {"tensor": self.tensor.traffic["all_gather"]}

    def ready(self) -> None:
        """Wait until every rank has loaded its model; then the first step begins.

        Raises:
            Stopped: this rank or another one was asked to stop meanwhile; no rank goes on.
        """
        self.failures.check_early()
        self.stop.begin()
        self.store.barrier(keys.READY)

    def stopped(self) -> bool:
        """Return whether this rank or another one was asked to stop; for places where no engine step would notice."""
        self.failures.check_in_passing()
        return self.stop.asked

    def asked_anywhere(self, when: str) -> bool:
        """Return whether any rank has been asked to stop by now; all get the same answer.

        All ranks call this, with a name `when` that no other call has. One rank may hear of a stop long before others.
        """
        self.store.barrier(keys.ASKED.format(when))
        asked = torch.tensor([float(self.stop.asked)], device=self.device)
        with self.failures.watched(True):
            return bool(self.everyone.sum(asked) > 0)

    def prepared(self) -> None:
        """Wait until every rank has made what it needs on its device."""
        self.store.barrier(keys.PREPARED)


def broadcast(comm: Communicator, tensor: Communicator, device: str, numbers: torch.Tensor) -> torch.Tensor:
    """Return the leader's numbers on all ranks of its replica: first its branch ranks, then their tensor ranks."""
    numbers = numbers.to(device)
    if tensor.rank == 0:
        numbers = comm.broadcast(numbers, 0, counted=False)
    return tensor.broadcast(numbers, 0, counted=False).cpu()


@cache
def packages() -> dict[str, str]:
    """Return the versions of the packages that turn prompts into tokens, by name."""
    return {package: version(package) for package in ("tokenizers", "transformers")}


@cache
def mpi_groups(mesh: Mesh, rank: int) -> tuple[Any, Any]:
    """Return the MPI communicators of a rank's branch group and of its tensor group.

    Neighbours on one axis have equal coordinates on the others. Communicators are made once per mesh: MPI can make only
    about two thousand, and the ranks may meet more often than that.
    """
    everyone, (data, branch, tensor) = mpi().COMM_WORLD, mesh.coordinates(rank)
    branches = everyone.Split(data * mesh.tensor + tensor, branch)
    return branches, everyone.Split(data * mesh.branch + branch, tensor)


def choose_backend(world: World, backend: str, device: torch.device) -> str:
    """Return solo, gloo, nccl or mpi; `auto` follows the launcher and the device."""
    if world.size == 1:
        return "solo"
    if backend == "solo":
        raise LaunchError(f"parallel.backend=solo with {world.size} ranks: use gloo, nccl or mpi, or start one process")
    if backend == "nccl" and device.type != "cuda":
        raise LaunchError("parallel.backend=nccl needs GPUs (model.device=cuda); use gloo on CPUs")
    if backend == "mpi" and world.launcher != "mpirun":
        raise LaunchError(f"parallel.backend=mpi needs mpirun; this job was started by {world.launcher}")
    shared = device.type == "cuda" and world.local_size > torch.cuda.device_count()
    if backend == "nccl" and shared:
        raise LaunchError(
            f"parallel.backend=nccl takes one rank a GPU, but {world.local_size} ranks share "
            f"{torch.cuda.device_count()} here: start as many as there are GPUs, or choose gloo"
        )
    if backend != "auto":
        return backend
    if device.type == "cuda":
        return "gloo" if shared else "nccl"
    return "mpi" if world.launcher == "mpirun" else "gloo"


def with_timeout(group: dist.ProcessGroup, timeout: timedelta) -> dist.ProcessGroup:
    """Return `group` with a timeout set; `init_device_mesh` made it with torch's default, half an hour."""
    group.set_timeout(timeout)
    return group
