"""How the ranks of a job notice that one of them failed, was lost or was asked to stop, and what they do then."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from lopa_dist.checks import UserError
from lopa_dist.parallel import store_keys as keys
from lopa_dist.parallel.communicator import PeerFailure, end_default_group
from lopa_dist.parallel.heartbeat import PATIENCE_S, Heartbeat
from lopa_dist.parallel.launcher import RankError, World, die, into_log, names_of
from lopa_dist.parallel.mesh import Mesh
from lopa_dist.parallel.neighbours import wait_until
from lopa_dist.parallel.pauses import Pauses
from lopa_dist.parallel.rendezvous import all_are_here, never_again, rendezvous
from lopa_dist.parallel.step_watch import StepWatch, Watched, unwatched
from lopa_dist.parallel.stop import Stop, Stopped

FEW_RANKS = 16  # up to this many ranks, every check asks the store
CHECKS_A_SECOND = 5000  # with more ranks, the most checks of all together
FRAMES = 8  # innermost frames of a stack to show; the outer ones are the same in every job


class Failures:
    """What one rank knows of the others' failures and stops; `with failures.guard():` encloses what ranks do together.

    Args:
        store: shared by all ranks.
        backend: of the collectives, as `group.choose_backend` returns it.
        timeout_s: seconds after which a rank that does not answer counts as lost.
        stop: what this rank was asked to do.

    Attributes:
        watched: the context for the parts of a step.
        pauses: for how long this process stood still.
        last_acts: called before this process is ended from another thread because a rank is lost.
    """

    def __init__(self, store: Store, world: World, mesh: Mesh, backend: str, timeout_s: float, stop: Stop) -> None:
        self.store, self.world, self.mesh, self.timeout_s, self.stop = store, world, mesh, timeout_s, stop
        self.watched: Watched = unwatched
        self.last_acts: list[Callable[[], None]] = []
        self._checked = 0.0  # time of the last `check_in_passing` that checked
        self.leaving = False  # whether this rank is leaving in order
        self.pauses = Pauses()
        if world.size == 1:
            return
        self.heart = Heartbeat(store, world.rank, world.size, timeout_s, self._cut_off)
        # with NCCL the watch must act first; the other communicators raise in time themselves
        limit_s = max(timeout_s - PATIENCE_S, 0.0) if backend == "nccl" else timeout_s
        self.watch = StepWatch(limit_s, self.announced, self.overdue, self._end, self._note)
        self.watched = self.watch.part

    def check(self) -> None:
        """Raise RankError if another rank failed or was lost; also exchange requests to stop.

        This is called between steps and while waiting, where no collective would notice. Schedulers do not signal every
        process, so a rank that was asked to stop tells the others.
        """
        if self.world.size == 1:
            return
        self.check_announced()
        if lost := self.heart.overdue:
            self.check_early()  # a rank that stopped in order before the first step is silent, but not lost
            why = f"no sign of life for {self.timeout_s:g} s; seen by rank {self.world.rank}"
            raise RankError(self._announce(self._lost(lost, why)))
        if self.stop.asked:
            self.store.set(keys.STOP, self.stop.signal)
        elif self.store.check([keys.STOP]):
            self.stop.ask(self.store.get(keys.STOP).decode())

    def check_in_passing(self) -> None:
        """Do what `check` does, but with many ranks not in every call, since they all ask the same store."""
        now = time.monotonic()
        if now - self._checked >= max(0, self.world.size - FEW_RANKS) / CHECKS_A_SECOND:
            self._checked = now
            self.check()

    def check_announced(self) -> None:
        """Raise RankError if another rank has announced an error."""
        if announced := self.announced():
            raise RankError(announced)

    def check_early(self) -> None:
        """Raise Stopped if another rank left before the first step, for which it will never be ready."""
        if self.store.check([keys.EARLY]):
            raise Stopped(self.store.get(keys.EARLY).decode())

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Enclose everything that ranks do together.

        Announce an error of this rank before it leaves, so that the others can name it. A broken or overdue
        collective becomes a `RankError` that names the missing rank.
        """
        with contextlib.suppress(ValueError):  # not in the main thread
            self.stop.install(self.end_if_lost)
        if self.world.size == 1:
            try:
                yield
            finally:
                self.close()
            return
        try:
            with self.announcing():
                yield
                self._leave()
        except Stopped as error:
            with contextlib.suppress(RuntimeError):  # the store's host may be gone
                never_again(self.store, str(error))
                if not self.stop.begun:
                    self.store.set(keys.EARLY, str(error))
                error.alone = not self._leave()
            raise
        finally:
            self.close()

    @contextmanager
    def announcing(self) -> Iterator[None]:
        """Announce an error of this rank to the others before it leaves.

        A broken collective, or another rank's failure, becomes a `RankError` that names who is to blame.
        """
        try:
            yield
        except Stopped:
            raise
        except RankError:
            self._linger()
            raise
        except (RuntimeError, TimeoutError) as error:
            if not isinstance(error, PeerFailure) and not broken(error):
                self.announce(error)
                raise
            diagnosis = self.diagnose(error)
            self._linger()  # gives the others time to learn of it
            raise RankError(diagnosis) from error
        except BaseException as error:
            self.announce(error)
            raise

    def leave(self) -> None:
        """Leave together with the other ranks, where no `guard` does it."""
        if self.world.size > 1:
            self._leave()
        self.close()

    def close(self) -> None:
        """End the threads that watch the ranks and this process.

        The threads and this object refer to each other. Without these references, connections and threads end with the
        group, not when garbage is collected: a program may have its ranks meet a thousand times.
        """
        self.pauses.close()
        if self.world.size > 1:
            self.watch.close()
            self.heart.close()

    def announce(self, error: BaseException) -> None:
        """Tell the others what went wrong here."""
        own, message, where = f"rank {self.world.rank}", str(error), ""
        with contextlib.suppress(RuntimeError):  # the store's host may be gone
            if len({*(host_of := hosts(self.store)).values()}) > 1:
                where = f" on {host_of.get(self.world.rank)}"
        self._announce(message if message.startswith(f"{own} ") else f"{own}{where}: {in_words(error)}")
        self._linger()

    def _linger(self) -> None:
        """Give the others time to read the store, which may end with this process if it is rank 0."""
        if self.world.rank == 0:
            time.sleep(PATIENCE_S)

    def _announce(self, verdict: str) -> str:
        """Announce `verdict` and return it; otherwise, ranks that find this one gone would blame it."""
        with contextlib.suppress(RuntimeError):  # the store's host may be gone
            announce_first(self.store, verdict)
        return verdict

    def diagnose(self, error: BaseException) -> str:
        """Return who has fallen silent after a collective broke with `error`, and why, as far as any rank said."""
        seen = f"seen by rank {self.world.rank}: {first_line(error)}"
        try:
            verdict = self._verdict(f"timeout {self.timeout_s:g} s; {seen}") or self._behind(seen)
        except RuntimeError:
            if self.world.launcher != "torchrun":
                return f"rank 0 is gone, and with it the rendezvous ({seen})"
            return (
                f"torchrun's agent is gone, and with it the rendezvous ({seen}); it ends when a rank has died, and its "
                "own lines in this log say which one, and how"
            )
        if verdict is None:
            return f"a collective failed although all ranks are alive ({first_line(error)})"
        return self._announce(verdict)

    def _leave(self) -> bool:
        """Leave together: no rank closes the store or a connection that another rank still needs.

        Returns:
            On rank 0 whether all ranks left in time; True on the others, which do not wait.
        """
        self.leaving = True
        left = self.store.add(keys.LEFT, 1)
        if self.world.rank == 0:
            end = time.monotonic() + self.timeout_s
            while left < self.world.size and time.monotonic() < end:
                time.sleep(0.02)
                left = self.store.add(keys.LEFT, 0)
        end_default_group()
        return self.world.rank > 0 or left >= self.world.size

    def _verdict(self, why: str) -> str | None:
        """Return what a rank announced before it left, else who has fallen silent; None if all ranks are well.

        If this rank itself was suspended for too long, the others have left because they could not hear it.
        """
        if announced := self.announced():
            return announced
        silent, away_s = self.heart.silent(), self.pauses.longest_s
        if silent and away_s > self.timeout_s:
            own = names_of([self.world.rank], self.world.size)
            lost = f"{own} did not answer for {away_s:.0f} s: its process was suspended, or its host ({why})"
        else:
            lost = self._lost(silent, why) if silent else ""
        return self.announced() or lost or None

    def announced(self) -> str | None:
        """Return what a rank announced before it left, or None."""
        return str(self.store.get(keys.FAILED).decode()) if self.store.check([keys.FAILED]) else None

    def _lost(self, silent: list[int], why: str) -> str:
        """Return a message that says which ranks are lost, and on which hosts."""
        host_of = hosts(self.store)
        where = " and ".join(sorted({host_of[rank] for rank in silent if rank in host_of}))
        where = f" on {where}" if where else ""
        return unanswering(silent, self.world.size, why, where)

    def end_if_lost(self) -> None:
        """End this process if another one is lost. Called on SIGTERM.

        torchrun sends SIGTERM to the survivors of a dead rank, often before their collective has failed. If nobody is
        missing, the job is being ended from outside, and may leave in order. The same holds if others have left in
        order: a launcher then ends the ranks that are about to leave.
        """
        if self.world.size == 1 or self.leaving:
            return
        verdict = None
        with contextlib.suppress(RuntimeError):  # the store's host may be gone
            if self.store.add(keys.LEFT, 0):
                return
            verdict = self._verdict(f"seen by rank {self.world.rank}, which was told to end")
        if verdict:
            into_log(verdict)
            die(f"lopa-dist: {verdict}", 143)

    def _cut_off(self) -> None:
        """End this process, whatever it waits for, since the store's host does not answer. Called by `Heartbeat`."""
        rank, rank_0 = self.world.rank, f"rank 0 of {self.world.size} does not answer"
        if self.world.launcher != "torchrun":
            seen = f"{rank_0}: its host, which keeps the rendezvous,"
        elif rank == 0:  # torchrun's process on this host keeps the rendezvous
            seen = "torchrun's process, which keeps the rendezvous, does not answer: it was suspended, or its host"
        else:
            there = "torchrun's process there, which keeps the rendezvous"
            seen = f"{rank_0}, or {there}: it was suspended, or its host"
        verdict = f"{seen} hangs or is unreachable (timeout {self.timeout_s:g} s; seen by rank {rank})"
        into_log(verdict)
        die(f"lopa-dist: {verdict}")

    def _note(self, waits: int) -> None:
        """Tell the others how far this rank has come. Called by `StepWatch`."""
        self.store.set(keys.WAITS.format(self.world.rank), str(waits))

    def _waits(self, rank: int) -> int:
        """Return how often a rank has waited for its device."""
        key = keys.WAITS.format(rank)
        return int(self.store.get(key)) if self.store.check([key]) else 0

    def overdue(self, waits: bool) -> str | None:
        """Return which rank keeps this one from going on; None: none does, this rank is busy. Called by `StepWatch`.

        Args:
            waits: whether this rank waits for the device, and so for the other ranks of its replica.
        """
        own = self.world.rank
        why = f"timeout {self.timeout_s:g} s; seen by rank {own}"
        verdict = self._verdict(why)
        if verdict or not waits:
            return verdict
        alive = f"what rank {own} waits for does not come, although all ranks are alive ({why})"
        return self._behind(why) or alive

    def _behind(self, why: str) -> str | None:
        """Return which ranks of this replica have not come as far as this one; None if all have."""
        own = self.world.rank
        replica = self.mesh.coordinates(own)[0]
        in_replica = [rank for rank in range(self.world.size) if self.mesh.coordinates(rank)[0] == replica]
        behind = [rank for rank in in_replica if self._waits(rank) < self._waits(own)]
        if not behind:
            return None
        names, verb = names_of(behind, self.world.size), "is" if len(behind) == 1 else "are"
        return f"{names} {verb} still at an earlier step: busy or hanging, though alive ({why})"

    def _end(self, verdict: str) -> None:
        """End this process, whose main thread waits in vain, and keep what it finished. Called by `StepWatch`."""
        for act in self.last_acts:
            with contextlib.suppress(Exception):
                act()
        self._announce(verdict)
        into_log(verdict)
        self._linger()
        die(f"lopa-dist: {verdict}\nthe main thread of rank {self.world.rank} was here:\n{main_thread()}")


def unanswering(ranks: Sequence[int], size: int, why: str, where: str = "") -> str:
    """Return a message that ranks of `size` do not answer; `why` says how that was seen, `where` on which hosts."""
    verb = "does" if len(ranks) == 1 else "do"
    return f"{names_of(ranks, size)} {verb} not answer: killed, hanging or unreachable{where} ({why})"


def hosts(store: Store) -> dict[int, str]:
    """Return the hosts of the ranks that have joined."""
    entries = store.get(keys.HERE).decode().split() if store.check([keys.HERE]) else []
    return {int(rank): host for rank, host in (entry.split("@", 1) for entry in entries)}


def announce_first(store: Store, message: str) -> None:
    """Announce a failure to all ranks, unless another one was announced before."""
    if store.add(keys.FAILURES, 1) == 1:
        store.set(keys.FAILED, message)


def in_words(error: BaseException) -> str:
    """Return an error's type and message; of a `UserError`, the message alone."""
    if isinstance(error, KeyboardInterrupt):
        return "it was interrupted"
    message, kind = str(error), type(error).__name__
    return message if isinstance(error, UserError) else f"{kind}: {message}" if message else kind


def announce_end(world: World, error: BaseException | None, meeting: int) -> None:
    """Tell ranks that wait for this one in another call of `LLM` that its program ends, and with which error."""
    why = "its program has ended" if error is None else in_words(error)
    with contextlib.suppress(Exception):  # the store's host may be gone
        announce_first(rendezvous(world, meeting=meeting), f"rank {world.rank}: {why}")


def announce_before_joining(world: World, error: Exception, limit_s: float, meeting: int = 0) -> None:
    """Tell the others, who have joined or will join, of an error that keeps this rank from joining.

    Args:
        limit_s: seconds that rank 0, which may keep the store, waits for the others to learn of it.
        meeting: as in `Group`.
    """
    if world.size == 1:
        return
    with contextlib.suppress(Exception):  # the store cannot be reached either
        store = rendezvous(world, meeting=meeting)
        announce_first(store, f"rank {world.rank}: {in_words(error)}")
        store.add(keys.JOINED, 1)
        if world.rank == 0:
            wait_until(
                lambda: store.add(keys.JOINED, 0) >= world.size, world, lambda: "the others are awaited", limit_s
            )
            all_are_here(world)
            time.sleep(PATIENCE_S)


def main_thread() -> str:
    """Return the innermost lines of the main thread's stack, for another thread that is about to end the process."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame, FRAMES)).rstrip()


def broken(error: BaseException) -> bool:
    """Return whether an exception comes from a collective rather than from this rank's own work."""
    if isinstance(error, OSError) and error.errno is not None:  # a system's error: a file server may time out, too
        return False
    if isinstance(error, (TimeoutError, dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)):
        return True
    text = str(error)
    return any(
        word in text for word in ("gloo", "Gloo", "Connection reset", "Connection closed", "NCCL", "Broken pipe")
    )


def first_line(error: BaseException) -> str:
    """Return the first line of a message, without torch's source locations."""
    line = (str(error) or type(error).__name__).strip().splitlines()[0]
    return line.split("] ", 1)[-1][:160]
