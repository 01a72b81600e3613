"""Ranks, as threads, find each other through one store: by a file, by torchrun's store, after a restart."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch._C._distributed_c10d import Store, TCPStore

from lopa_dist.parallel import rendezvous as rendezvous_file
from lopa_dist.parallel import store_keys as keys
from lopa_dist.parallel.launcher import LaunchError, World
from lopa_dist.parallel.rendezvous import CONNECTIONS, host, never_again, rendezvous
from lopa_dist.parallel.stop import Stopped
from tests.ports import free_port


@pytest.fixture(autouse=True)
def another_process() -> Iterator[None]:
    """A process keeps its connection."""
    CONNECTIONS.clear()
    yield
    CONNECTIONS.clear()


@pytest.fixture
def agent() -> TCPStore:
    """The store of torchrun's agent, which outlives the ranks."""
    return TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), False)


def start(agent: TCPStore, size: int, meeting: int = 0, counts: tuple[int, ...] = ()) -> list[Store]:
    """All ranks' stores; agents count restarts by themselves, and differently."""

    def join(rank: int) -> Store:
        environment = {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agent.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(counts[rank]) if counts else "0",
        }  # fmt: skip
        return rendezvous(World("torchrun", rank, size, rank, size), environment, meeting)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(join, range(size)))


def test_ranks_that_torchrun_restarts_meet_anew_and_together(agent: TCPStore) -> None:
    """Also where only one of the agents counts the restart, and when a rank died while it arrived."""
    first = start(agent, 3)
    first[0].set("x", "of the dead")
    assert all(store.get("x") == b"of the dead" for store in first)
    CONNECTIONS.clear()
    agent.add(keys.ARRIVALS, 1)
    second = start(agent, 3, counts=(0, 1, 1))
    assert not any(store.check(["x"]) for store in second)
    second[1].set("x", "new")
    assert all(store.get("x") == b"new" for store in second)


def test_every_meeting_of_the_same_processes_has_keys_of_its_own_and_no_new_connection(agent: TCPStore) -> None:
    first, second = (start(agent, 2, meeting) for meeting in (0, 1))
    first[0].set("x", "1")
    assert not second[1].check(["x"])
    assert [a.underlying_store is b.underlying_store for a, b in zip(first, second, strict=True)] == [True, True]


def test_ranks_that_are_started_again_after_a_stop_stop_too(agent: TCPStore) -> None:
    never_again(start(agent, 2)[1], "stopped by SIGUSR1")
    CONNECTIONS.clear()
    with pytest.raises(Stopped, match=r"^stopped by SIGUSR1; torchrun started it again in vain$"):
        start(agent, 2)


@pytest.mark.timeout(60)
def test_a_store_whose_host_ends_just_after_it_has_answered_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setattr(rendezvous_file, "answers", lambda *_: True)
    monkeypatch.setattr(rendezvous_file, "CONNECT", timedelta(seconds=0.5))
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with pytest.raises(LaunchError, match=f"^torchrun's agent at 127.0.0.1:{port} does not answer any more"):
        rendezvous(World("torchrun", 1, 2), environment)


def test_a_store_for_the_ranks_of_one_machine_is_reached_from_there_alone() -> None:
    """It has no password."""
    for_two_nodes = host(World("mpirun", 0, 4, 0, 2))
    with socket.create_connection(("127.0.0.2", for_two_nodes.port), 5):
        pass  # as another node would
    local = host(World("mpirun", 0, 2, 0, 2))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", local.port), 5)
    local.set("x", "y")
    assert TCPStore("127.0.0.1", local.port, None, False, timedelta(seconds=5)).get("x") == b"y"


@pytest.mark.parametrize("rank", [0, 1])
def test_mpirun_of_another_mpi_is_named(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Each process is then alone as far as mpi4py knows."""
    alone = SimpleNamespace(Get_size=lambda: 1)
    other = SimpleNamespace(COMM_WORLD=alone, Get_library_version=lambda: "MPICH Version: 5.0.2\nmore")
    monkeypatch.setattr(rendezvous_file, "mpi", lambda: other)
    with pytest.raises(LaunchError, match=r"started 2 ranks, but mpi4py finds 1 with MPICH Version: 5\.0\.2: take"):
        rendezvous(World("mpirun", rank, 2, rank, 2), {})


def test_srun_ranks_meet_through_a_file(tmp_path: Path) -> None:
    """Rank 0 chooses the port; the others read it, and all see one store.

    A job of the same number, of another cluster or before this one was set up again, was killed before all had joined.
    """
    environment = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    rendezvous_file.rendezvous_file(environment | {"SLURM_STEP_LAUNCHER_PORT": "40000"}).write_text("127.0.0.1 9")
    environment |= {"SLURM_STEP_LAUNCHER_PORT": "40001"}
    counts: list[int] = []
    stores = []  # rank 0's serves the others until all have ended

    def join(rank: int) -> None:
        store = rendezvous(World("srun", rank, 3, rank, 3), environment)
        stores.append(store)
        counts.append(store.add("x", 1))
        while store.add("x", 0) < 3:
            pass

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (2, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(counts) == [1, 2, 3]
