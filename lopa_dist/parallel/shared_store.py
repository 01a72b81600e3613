"""Collectives over the store that all ranks share: slow, but between any ranks, and they notice failures meanwhile."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from torch._C._distributed_c10d import Store

from lopa_dist.parallel import store_keys as keys
from lopa_dist.parallel.failures import Failures, hosts
from lopa_dist.parallel.launcher import JOIN, World
from lopa_dist.parallel.neighbours import LOOK_S, pause_s, wait_until

T = TypeVar("T")

NAMED = 5  # differences, or ranks, that a message lists
SAME = "Give all ranks the same command line, input, checkpoint, packages and C compiler (or engine.kernels=torch)"
PART = 1 << 20  # most characters of a value: the store refuses long ones


class SharedStore:
    """What all ranks of a job tell each other before and after decoding.

    Every method except `join` raises RankError if another rank failed or was lost, and Stopped if another rank left
    before the first step.
    """

    def __init__(self, store: Store, world: World, failures: Failures) -> None:
        self.store, self.world, self.failures = store, world, failures

    def join(self, limit_s: float = JOIN.total_seconds(), check_alive: Callable[[], None] | None = None) -> None:
        """Wait until all processes have started, and log now and then who is awaited.

        Silence is not a failure yet: a process may still be importing torch. But `check_alive`, which is called
        meanwhile, may know better, and raise an error.

        Raises:
            LaunchError: that takes longer than `limit_s`.
            RankError: a rank announced that it cannot join.
        """
        self.store.append(keys.HERE, f"{self.world.rank}@{socket.gethostname()} ")  # type: ignore[attr-defined]
        self.store.add(keys.JOINED, 1)

        def all_joined() -> bool:
            self.failures.check_announced()
            if check_alive:
                check_alive()
            return self.store.add(keys.JOINED, 0) >= self.world.size

        wait_until(all_joined, self.world, self.joined, limit_s)

    def joined(self) -> str:
        """Return, in words, how many ranks have joined, and which are missing."""
        here = hosts(self.store)
        missing = [rank for rank in range(self.world.size) if rank not in here]
        more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        names = ", ".join(f"rank {rank}" for rank in missing[:NAMED]) + more
        return f"{len(here)} of {self.world.size} ranks have joined; missing: {names}"

    def look_around(self) -> None:
        """Check for failures and stops."""
        self.failures.check()
        self.failures.check_early()

    def wait(self) -> None:
        """Look around, then pause for a moment."""
        self.look_around()
        time.sleep(pause_s(self.world.size))

    def between(self, items: Iterable[T]) -> Iterator[T]:
        """Yield `items`, and look around between them, at most once in `LOOK_S`: reading them may take long."""
        looked = time.monotonic()
        for item in items:
            if self.world.size > 1 and time.monotonic() - looked > LOOK_S:
                self.look_around()
                looked = time.monotonic()
            yield item

    def barrier(self, key: str) -> None:
        """Wait until all ranks have reached this; `key` is one of `store_keys`, which no other barrier uses."""
        count = self.store.add(key, 1)
        while count < self.world.size:
            self.wait()
            count = self.store.add(key, 0)

    def broadcast(self, name: str, value: str) -> str:
        """Return rank 0's value, on every rank."""
        if self.world.size == 1:
            return value
        key = keys.BROADCAST.format(name)
        if self.world.rank == 0:
            self.store.set(key, value)
        while not self.store.check([key]):
            self.wait()
        return str(self.store.get(key).decode())

    def broadcast_flag(self, name: str, value: bool) -> bool:
        """Return rank 0's value, true or false, on every rank."""
        return self.broadcast(name, "yes" if value else "no") == "yes"

    def agree(self, name: str, own: Mapping[str, Any], remedy: str = SAME) -> None:
        """Return once every rank has said that it would do the same as rank 0; all ranks call this.

        Rank 0's statement is one value in the store, with which every rank compares its own, so a thousand ranks take
        no longer than a broadcast.

        Args:
            name: the statement's own name.
            own: what this rank would do, with values that JSON can hold.
            remedy: what to do if ranks differ.

        Raises:
            ValueError: this rank would do something else; the message says what. The other ranks get a RankError.
        """
        if self.world.size == 1:
            return
        statement = json.dumps(own, sort_keys=True)
        mine, first = json.loads(statement), json.loads(self.broadcast(f"statement/{name}", statement))
        differing = [key for key in sorted(first.keys() | mine.keys()) if first.get(key) != mine.get(key)]
        if differing:
            named = "; ".join(f"{key} is {mine.get(key)!r}, on rank 0 {first.get(key)!r}" for key in differing[:NAMED])
            more = f"; and {len(differing) - NAMED} more" if len(differing) > NAMED else ""
            who = f"rank {self.world.rank} on {socket.gethostname()}"
            raise ValueError(f"{who} would not do the same as rank 0: {named}{more}. {remedy}")
        self.barrier(keys.AGREED.format(name))

    def sum(self, amounts: dict[str, int]) -> dict[str, int]:
        """Return the sums over all ranks, on every rank.

        All wait for the last: a rank that left while others still decode or judge would seem lost to them, and with
        some launchers end the job. So after this call, every rank knows of any stop that was asked for before it.
        """
        for name, amount in amounts.items():
            self.store.add(keys.SUM.format(name), amount)
        self.failures.check()
        self.barrier(keys.SUMMED)
        self.failures.check()
        return {name: self.store.add(keys.SUM.format(name), 0) for name in amounts}

    def gather(self, text: str | None, replica: int, replicas: int) -> list[str]:
        """Return the texts of all replicas, on every rank; all ranks call this, once.

        Args:
            text: the text of this rank's replica, on its leader; None on its other ranks.
            replica: the number of this rank's replica.
            replicas: how many there are.
        """
        parts = [] if text is None else [text[begin : begin + PART] for begin in range(0, len(text), PART)]
        for number, part in enumerate(parts):
            self.store.set(keys.GATHER_PART.format(replica, number), part)
        if text is not None:
            self.store.set(keys.GATHER_COUNT.format(replica), str(len(parts)))
        self.barrier(keys.GATHER_WRITTEN)
        counts = [int(count) for count in self.store.multi_get([keys.GATHER_COUNT.format(r) for r in range(replicas)])]
        texts = []
        for other, count in enumerate(counts):
            names = [keys.GATHER_PART.format(other, number) for number in range(count)]
            texts.append(b"".join(self.store.multi_get(names)).decode() if names else "")
        self.barrier(keys.GATHER_READ)
        for number in range(len(parts)):  # the store may outlive this group
            self.store.delete_key(keys.GATHER_PART.format(replica, number))
        return texts
