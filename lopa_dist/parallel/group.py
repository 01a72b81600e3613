"""A job's ranks joined: communicators of its branch and tensor groups, the shared queue, and what a lost rank does."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import init_device_mesh

from lopa_dist.parallel.communicator import Communicator, PeerFailure, Solo, TorchCommunicator
from lopa_dist.parallel.heartbeat import PATIENCE_S, Heartbeat
from lopa_dist.parallel.launcher import JOIN, LaunchError, World, mpi, rendezvous, rendezvous_file
from lopa_dist.parallel.mesh import Mesh
from lopa_dist.parallel.mpi_communicator import MpiCommunicator
from lopa_dist.parallel.stacks import main_thread
from lopa_dist.parallel.step_watch import StepWatch, Watched, unwatched
from lopa_dist.parallel.stop import Stop, Stopped

PART = 1 << 20  # characters of a value in the store, which refuses long ones
TALLY_S = 0.5
NCCL_GRACE_S = 30.0  # beyond the timeout, for NCCL's own watchdog: it aborts the process without a word of who is lost


class RankError(RuntimeError):
    """A rank was lost or failed; the message names it and the first cause."""


class Group:
    """The job as one of its ranks sees it; `with group.guard():` around the work.

    Processes that join again, after `guard` has ended, count their meetings, each from 0.
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
    ) -> None:
        self.world, self.mesh, self.timeout_s, self.stop = world, mesh, timeout_s, stop
        self.data_rank, self.branch_rank, self.tensor_rank = mesh.place(world.rank)
        self.store: Store | None = None
        self.backend = choose_backend(world, backend, device)
        self.comm: Communicator = Solo()  # the branch group
        self.tensor: Communicator = Solo()
        self.watched: Watched = unwatched  # around the parts of a step
        self.last_acts: list[Callable[[], None]] = []  # before a lost rank ends this process from another thread
        self._taken = 0
        self._untold, self._told_at = Counter[str](), 0.0  # for `tally`
        self._totals = dict.fromkeys(("done", "tokens", "forwards", "judged", "right"), 0)
        if world.size == 1:
            return
        try:
            self.store = rendezvous(world, meeting=meeting)
            self.heart = Heartbeat(self.store, world.rank, world.size, timeout_s, self._cut_off)
            self.watch = self._watch()
            self.watched = self.watch.part
            self._count_in("joined", JOIN.total_seconds())  # ranks may take long to import torch
            if self.backend == "mpi":
                self._split_mpi(mpi().COMM_WORLD)
                return
            timeout = timedelta(seconds=timeout_s + NCCL_GRACE_S * (self.backend == "nccl"))
            dist.init_process_group(
                self.backend, store=self.store, rank=world.rank, world_size=world.size, timeout=timeout
            )
            names = ("data", "branch", "tensor")
            axes = init_device_mesh(device.type, (mesh.data, mesh.branch, mesh.tensor), mesh_dim_names=names)
        except RuntimeError as error:
            raise LaunchError(f"rank {world.rank} could not join the others: {first_line(error)}") from error
        if mesh.branch > 1:
            self.comm = TorchCommunicator(within(axes.get_group("branch"), timeout))
        if mesh.tensor > 1:
            self.tensor = TorchCommunicator(within(axes.get_group("tensor"), timeout))

    def _watch(self) -> StepWatch:
        """The thread that ends this process where it waits in vain, and NCCL would not say so.

        With NCCL it comes first; the other communicators raise in time themselves.
        """
        limit_s = max(self.timeout_s - PATIENCE_S, 0.0) if self.backend == "nccl" else self.timeout_s
        return StepWatch(limit_s, self._announced, self._overdue, self._end, self._note)

    def _note(self, waits: int) -> None:
        """Tell the others how far this rank has come."""
        assert self.store is not None
        self.store.set(f"waits/{self.world.rank}", str(waits))

    def _announced(self) -> str | None:
        """What a rank announced before it left."""
        assert self.store is not None
        return str(self.store.get("failed").decode()) if self.store.check(["failed"]) else None

    def _overdue(self, waits: bool) -> str | None:
        """Who keeps this rank from going on; None: nobody, it is busy itself.

        Args:
            waits: it waits for the device, and so for the other ranks of its replica.
        """
        why = f"timeout {self.timeout_s:g} s; seen by rank {self.world.rank}"
        verdict = self._verdict(why)
        if verdict or not waits:
            return verdict
        assert self.store is not None
        mates = [r for r in range(self.world.size) if self.mesh.place(r)[0] == self.data_rank]
        come = {r: int(self.store.get(f"waits/{r}")) if self.store.check([f"waits/{r}"]) else 0 for r in mates}
        behind = [r for r in mates if come[r] < come[self.world.rank]]
        if behind:
            verb = "is" if len(behind) == 1 else "are"
            return f"{self._names(behind)} {verb} still at an earlier step: busy or hanging, though alive ({why})"
        return f"what rank {self.world.rank} waits for does not come, although all ranks are alive ({why})"

    def _end(self, verdict: str) -> None:
        """End this process, whose main thread waits in vain. What it finished is kept."""
        for act in self.last_acts:
            with contextlib.suppress(Exception):
                act()
        die(f"lopa-dist: {verdict}\nthe main thread of rank {self.world.rank} was here:\n{main_thread()}")

    def _split_mpi(self, everyone: Any) -> None:
        """The same groups among MPI's ranks; neighbours of one axis have the same place on the others."""
        mesh, (data, branch, tensor) = self.mesh, (self.data_rank, self.branch_rank, self.tensor_rank)
        branches = everyone.Split(data * mesh.tensor + tensor, branch)
        tensors = everyone.Split(data * mesh.branch + branch, tensor)
        self.comm = MpiCommunicator(branches, self.timeout_s)
        if mesh.tensor > 1:
            self.tensor = MpiCommunicator(tensors, self.timeout_s)

    @property
    def traffic(self) -> dict[str, int]:
        """Bytes that this rank gave to the collectives of its branch group, and to those of its tensor group."""
        return self.comm.traffic.bytes | {"tensor": self.tensor.traffic.bytes["all_gather"]}

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for its replica."""
        return self.branch_rank == self.tensor_rank == 0

    def take(self, most: int, total: int) -> list[int]:
        """The next request numbers for this replica, at most `most` of `total`: from one counter of all replicas.

        Every rank of a replica calls this at the same step; the leader asks, the others are told.
        """
        self.heed()
        if self._taken >= total:
            return []
        if self.mesh.data == 1:
            first = self._taken
            self._taken = min(total, first + most)
            return list(range(first, self._taken))
        assert self.store is not None
        numbers = torch.zeros(most, dtype=torch.int64)
        if self.leads:
            last = self.store.add("requests", most)
            numbers = torch.arange(last - most, last)
        mine: list[int] = self._tell(numbers).tolist()
        self._taken = mine[-1] + 1
        return [n for n in mine if n < total]

    def heed(self) -> None:
        """Between steps and while waiting: leave when another rank failed, hear of a stop that another was told."""
        self._stop_if_failed()
        self._share_stop()

    def _share_stop(self) -> None:
        """What one replica was told, all should know: schedulers do not signal every process."""
        if self.store is None:
            return
        if self.stop.asked:
            self.store.set("stop", self.stop.signal)
        elif self.store.check(["stop"]):
            self.stop.ask(self.store.get("stop").decode())

    def _tell(self, numbers: torch.Tensor) -> torch.Tensor:
        """The leader's numbers on all ranks of the replica."""
        numbers = numbers.to("cuda" if self.backend == "nccl" else "cpu")
        if self.tensor_rank == 0:
            numbers = self.comm.broadcast(numbers, 0, counted=False)
        return self.tensor.broadcast(numbers, 0, counted=False).cpu()

    def ready(self) -> None:
        """Wait until every rank is: their models may load at different speeds. Then the first step begins.

        Raises:
            Stopped: this rank or another one was asked to stop meanwhile; none of them goes on.
        """
        self._end_early()
        self.stop.begin()
        if self.store is None:
            return
        self._count_in("ready", float("inf"))
        if self.world.launcher == "srun" and self.world.rank == 0:
            rendezvous_file().unlink(missing_ok=True)

    def prepared(self) -> None:
        """Wait until every rank is, once more: what they made on their devices took them more or less time."""
        if self.store is not None:
            self._count_in("prepared", float("inf"))

    def _count_in(self, what: str, limit_s: float) -> None:
        """Wait until all ranks have come here, unless one fails."""
        assert self.store is not None
        count, end = self.store.add(what, 1), time.monotonic() + limit_s
        while count < self.world.size:
            if time.monotonic() > end:
                raise LaunchError(f"only {count} of {self.world.size} ranks joined within {limit_s:.0f} s")
            if what != "joined":
                self.heed()
                self._end_early()
            time.sleep(0.02)
            count = self.store.add(what, 0)

    def agree(self, name: str, value: str) -> str:
        """Rank 0's value, on every rank."""
        if self.store is None:
            return value
        if self.world.rank == 0:
            self.store.set(f"agree/{name}", value)
        while not self.store.check([f"agree/{name}"]):
            self._stop_if_failed()
            self._end_early()
            time.sleep(0.02)
        return str(self.store.get(f"agree/{name}").decode())

    def tally(self, **amounts: int) -> dict[str, int]:
        """Add to the job's counters of finished requests; rank 0 gets what all replicas added.

        Replicas tell each other once in `TALLY_S`, and when this is called without amounts: a round trip for each
        counter and request would take longer than what it counts.
        """
        if self.store is None or self.mesh.data == 1:
            for name, amount in amounts.items():
                self._totals[name] += amount
            return self._totals
        self._untold.update(amounts)
        if amounts and time.monotonic() - self._told_at < TALLY_S:
            return self._totals
        for name, amount in self._untold.items():
            self.store.add(f"tally/{name}", amount)
        self._untold.clear()
        self._told_at = time.monotonic()
        if self.world.rank == 0:
            self._totals = {name: self.store.add(f"tally/{name}", 0) for name in self._totals}
        return self._totals

    def _stop_if_failed(self) -> None:
        """Leave when another rank failed or fell silent: where no collective would notice, this does."""
        if self.store is None:
            return
        if self.store.check(["failed"]):
            raise RankError(self.store.get("failed").decode())
        lost = self.heart.overdue(self.timeout_s)
        if lost:
            raise RankError(
                self._lost(lost, f"no sign of life for {self.timeout_s:g} s; seen by rank {self.world.rank}")
            )

    def _end_early(self) -> None:
        """Leave where another rank left before the first step, which it will never be ready for."""
        if self.store is not None and self.store.check(["early"]):
            raise Stopped(self.store.get("early").decode())

    def total(self, amounts: dict[str, int]) -> dict[str, int]:
        """Sums over all ranks.

        All wait for the last: a rank that left while others still decode or judge would seem lost to them, and with
        some launchers end the job. So after this all know of a stop that any of them was told before.
        """
        if self.store is None:
            return amounts
        for name, amount in amounts.items():
            self.store.add(f"total/{name}", amount)
        self.heed()
        self._count_in("totalled", float("inf"))
        self.heed()
        return {name: self.store.add(f"total/{name}", 0) for name in amounts}

    def share(self, text: str) -> list[str]:
        """What the leader of every replica has to tell, by replica, on every rank; all ranks call this, once."""
        if self.store is None:
            return [text]
        parts = [text[at : at + PART] for at in range(0, len(text), PART)] if self.leads else []
        for number, part in enumerate(parts):
            self.store.set(f"share/{self.data_rank}/{number}", part)
        if self.leads:
            self.store.set(f"share/{self.data_rank}", str(len(parts)))
        self._count_in("told", float("inf"))
        told = []
        for replica in range(self.mesh.data):
            keys = [f"share/{replica}/{number}" for number in range(int(self.store.get(f"share/{replica}")))]
            told.append(b"".join(self.store.get(key) for key in keys).decode())
        self._count_in("heard", float("inf"))
        for number in range(len(parts)):  # the store may outlive this meeting
            self.store.delete_key(f"share/{self.data_rank}/{number}")
        return told

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Around everything that ranks do together.

        An error of this rank is announced before it leaves, so that the others can name it; a broken or overdue
        collective becomes a `RankError` that names who is missing.
        """
        with contextlib.suppress(ValueError):  # not in the main thread
            self.stop.install(self._end_if_lost)
        if self.store is None:
            yield
            return
        try:
            yield
            self._leave()
        except RankError:
            raise
        except Stopped as error:
            if not self.stop.begun:
                self.store.set("early", str(error))
            self._leave()
            raise
        except PeerFailure as error:
            raise RankError(self.roll_call(error)) from error
        except (RuntimeError, TimeoutError) as error:
            if not broken(error):
                self.announce(error)
                raise
            raise RankError(self.roll_call(error)) from error
        except BaseException as error:
            self.announce(error)
            raise
        finally:
            self.watch.close()
            self.heart.close()

    def announce(self, error: BaseException) -> None:
        """Tell the others what went wrong here; the first announcement stays."""
        assert self.store is not None
        message = f"rank {self.world.rank}: {type(error).__name__}: {error}"
        with contextlib.suppress(RuntimeError):  # the store's host may be gone
            if self.store.add("failures", 1) == 1:
                self.store.set("failed", message)
        if self.world.rank == 0:
            time.sleep(PATIENCE_S)  # its end is the store's: until all have heard

    def roll_call(self, error: BaseException) -> str:
        """Who has fallen silent after a broken collective, and why as far as anyone said."""
        seen = f"seen by rank {self.world.rank}: {first_line(error)}"
        try:
            verdict = self._verdict(f"timeout {self.timeout_s:g} s; {seen}")
        except RuntimeError:
            return f"rank 0 is gone, and with it the rendezvous ({seen})"
        return verdict or f"a collective failed although all ranks are alive ({first_line(error)})"

    def _verdict(self, why: str) -> str | None:
        """What a rank announced before it left, else who has fallen silent; None when all are well."""
        silent = [] if self._announced() else self.heart.silent()
        return self._announced() or (self._lost(silent, why) if silent else None)

    def _lost(self, missing: list[int], why: str) -> str:
        verb = "does" if len(missing) == 1 else "do"
        return f"{self._names(missing)} {verb} not answer: killed, hanging or unreachable ({why})"

    def _names(self, ranks: list[int]) -> str:
        return " and ".join(f"rank {r}" for r in ranks) + f" of {self.world.size}"

    def _cut_off(self) -> None:
        """The store's host does not answer. Whatever this rank waits for, it ends here and now."""
        die(
            f"lopa-dist: rank 0 of {self.world.size} does not answer: its host, which keeps the rendezvous, hangs or "
            f"is unreachable (timeout {self.timeout_s:g} s; seen by rank {self.world.rank})"
        )

    def _end_if_lost(self) -> None:
        """At SIGTERM. torchrun sends it to the survivors of a dead rank, often before their collective has failed: so
        the roll is called here, too. With nobody missing the job is being ended from outside, and may do so in order.
        """
        if self.store is None:
            return
        verdict = None
        with contextlib.suppress(RuntimeError):  # the store's host may be gone
            verdict = self._verdict(f"seen by rank {self.world.rank}, which was told to end")
        if verdict:
            die(f"lopa-dist: {verdict}", 143)

    def _leave(self) -> None:
        """End together: nobody closes the store or a connection that another rank still needs."""
        assert self.store is not None
        done = self.store.add("done", 1)
        if self.world.rank == 0:
            end = time.monotonic() + self.timeout_s
            while done < self.world.size and time.monotonic() < end:
                time.sleep(0.02)
                done = self.store.add("done", 0)
        if dist.is_initialized():
            dist.destroy_process_group()


def choose_backend(world: World, backend: str, device: torch.device) -> str:
    """solo, gloo, nccl or mpi; `auto` follows the launcher and the device."""
    if world.size == 1:
        return "solo"
    if backend == "solo":
        raise LaunchError(f"parallel.backend=solo with {world.size} ranks: use gloo, nccl or mpi, or start one process")
    if backend == "nccl" and device.type != "cuda":
        raise LaunchError("parallel.backend=nccl needs GPUs (model.device=cuda); use gloo on CPUs")
    if backend == "mpi" and world.launcher != "mpirun":
        raise LaunchError(f"parallel.backend=mpi needs mpirun; this job was started by {world.launcher}")
    if backend != "auto":
        return backend
    if device.type == "cuda":
        return "nccl"
    return "mpi" if world.launcher == "mpirun" else "gloo"


def within(group: dist.ProcessGroup, timeout: timedelta) -> dist.ProcessGroup:
    """The group with this timeout: those that a mesh makes have not the job's, and would wait for half an hour."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)
    return group


def broken(error: BaseException) -> bool:
    """Whether an exception comes from a collective rather than from this rank's own work."""
    if isinstance(error, (TimeoutError, dist.DistBackendError, dist.DistNetworkError)):
        return True
    text = str(error)
    return any(
        word in text for word in ("gloo", "Gloo", "Connection reset", "Connection closed", "NCCL", "Broken pipe")
    )


def first_line(error: BaseException) -> str:
    """The first line of a message, without torch's source locations."""
    line = (str(error) or type(error).__name__).strip().splitlines()[0]
    return line.split("] ", 1)[-1][:160]


def die(message: str, status: int = 1) -> None:
    """Leave at once: after a lost rank, tidy shutdown would wait for it."""
    sys.stderr.write(message + "\n")
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(status)
