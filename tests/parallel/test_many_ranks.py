"""Threads as 256 ranks of one store: what they ask of it, and what its host has open for them, stays in bounds."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, TCPStore

from lopa_dist.parallel import failures as module
from lopa_dist.parallel import store_keys as keys
from lopa_dist.parallel.failures import Failures
from lopa_dist.parallel.launcher import RankError, World
from lopa_dist.parallel.mesh import Mesh
from lopa_dist.parallel.rendezvous import FILES_A_RANK, host
from lopa_dist.parallel.shared_store import SharedStore
from lopa_dist.parallel.stop import Stop

RANKS = 256
LIMIT_S = 4.0  # a rank that is silent for longer is lost: not one that waits for a core, with 256 in one process
SETTINGS = 4000  # characters that a rank's statement has of them


class Counted:
    """A store that counts requests, by what they are, and the bytes that it holds by their keys."""

    def __init__(self, store: HashStore, requests: Counter[str]) -> None:
        self._store, self._requests = store, requests
        self.bytes: dict[str, int] = {}

    def clone(self) -> Counted:
        return self

    def __getattr__(self, name: str) -> Any:
        self._requests[name] += 1
        real = getattr(self._store, name)

        def kept(key: str, value: Any) -> Any:
            size = 20 if name == "add" else len(value)  # counts take as much at most
            before = self.bytes[key] if name == "append" and key in self.bytes else len(key)
            self.bytes[key] = before + size
            return real(key, value)

        return kept if name in ("add", "set", "append") else real


def test_requests_do_not_grow_with_the_square_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """They join, agree, beat and look around while rank 0 is busy, add up, and part; one that falls silent is found.

    Neither does the memory of rank 0: what the store holds, and what its own heartbeat keeps of the others.
    """
    ended: list[str] = []
    monkeypatch.setattr(module, "die", ended.append)  # it would end this process, in which all ranks are
    requests: Counter[str] = Counter()
    store: Any = Counted(HashStore(), requests)
    silent, busy_s = RANKS - 1, 3.0
    waited = threading.Barrier(RANKS)
    at: dict[str, tuple[int, float]] = {}
    of_others: list[int] = []

    def mark(name: str) -> None:
        if waited.wait() == 0:
            at[name] = requests.total(), time.monotonic()
        waited.wait()

    def run(rank: int) -> str:
        world = World("torchrun", rank, RANKS)
        failures = Failures(store, world, Mesh(RANKS, 1), "gloo", LIMIT_S, Stop(5.0))
        shared = SharedStore(store, world, failures)
        try:
            mark("begun")
            shared.join()
            shared.agree("work", {"seed": 0, "input": "x" * SETTINGS})
            mark("agreed")
            if rank == 0:
                time.sleep(busy_s)
            shared.broadcast("name", "value")
            assert shared.sum({"a": 1}) == {"a": RANKS}
            mark("summed")
            if rank == 0:
                of_others.append(sum(map(sys.getsizeof, vars(failures.heart).values())))
            if rank == silent:
                failures.close()
                return ""
            end = time.monotonic() + 60
            while time.monotonic() < end:
                time.sleep(0.1)
                failures.check_in_passing()
            return ""
        except RankError as error:
            return str(error)
        finally:
            failures.close()

    with ThreadPoolExecutor(RANKS) as threads:
        said = list(threads.map(run, range(RANKS)))
    assert not ended
    assert all(f"rank {silent} of {RANKS} does not answer" in text for text in said[:silent])
    joining = at["agreed"][0] - at["begun"][0]
    waiting, seconds = (now - before for now, before in zip(at["summed"], at["agreed"], strict=True))
    assert joining < 60 * RANKS, requests
    assert waiting / RANKS < 20 + 60 * seconds, "requests of a rank: those of the end, and those of waiting"
    assert sum(store.bytes.values()) < 2 * SETTINGS + 64 * RANKS, "one statement for all, and a few bytes per rank"
    assert of_others[0] < 4096 + 24 * RANKS


def test_the_host_of_the_store_has_few_files_open_for_a_rank_and_little_memory() -> None:
    def held() -> int:
        return len(os.listdir("/proc/self/fd"))

    def resident() -> int:
        """Bytes of this process in memory."""
        with open("/proc/self/statm") as sizes:
            return int(sizes.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    if not os.path.exists("/proc/self/fd"):
        pytest.skip("needs /proc")
    ranks, before, memory = 16, held(), resident()
    store = host(World("mpirun", 0, ranks, 0, ranks))
    clients = [TCPStore("127.0.0.1", store.port, None, False, timedelta(seconds=20)) for _ in range(ranks)]
    own = [client.clone() for client in clients]  # type: ignore[attr-defined]  # a heartbeat's
    for rank, client in enumerate(own):
        client.add(keys.BEAT.format(rank), 1)
    assert resident() - memory < 250_000 * ranks, "server, clients, and what the system holds for both"
    assert held() - before <= FILES_A_RANK * ranks + 16, "both ends of all connections are in this process"
    del own, clients, client
