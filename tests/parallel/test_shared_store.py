"""Ranks, as threads over one store, exchange values before and after decoding, and notice who left."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier
from typing import TypeVar

import pytest
from torch._C._distributed_c10d import HashStore

from lopa_dist.parallel import failures, neighbours, shared_store
from lopa_dist.parallel import store_keys as keys
from lopa_dist.parallel.failures import Failures, announce_before_joining
from lopa_dist.parallel.launcher import LaunchError, RankError, World
from lopa_dist.parallel.mesh import Mesh
from lopa_dist.parallel.shared_store import SharedStore
from lopa_dist.parallel.stop import Stop, Stopped

T = TypeVar("T")


@contextmanager
def joined(store: HashStore, rank: int, size: int) -> Iterator[SharedStore]:
    world = World("torchrun", rank, size)
    known = Failures(store, world, Mesh(size, 1), "gloo", 60.0, Stop(5.0))
    try:
        yield SharedStore(store, world, known)
    finally:
        known.close()


def on_ranks(size: int, work: Callable[[SharedStore, int], T]) -> list[T]:
    store, all_joined = HashStore(), Barrier(size)

    def run(rank: int) -> T:
        with joined(store, rank, size) as shared:
            shared.join(60.0)
            all_joined.wait(60.0)  # a rank that fails at once would be told to those that look for it in `join`
            return work(shared, rank)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))


def test_rank_0s_value_is_on_every_rank() -> None:
    assert on_ranks(3, lambda shared, rank: shared.broadcast("name", f"rank {rank}")) == ["rank 0"] * 3
    for value in (True, False):
        assert (
            on_ranks(3, lambda shared, rank, own=value: shared.broadcast_flag("flag", own ^ (rank > 0))) == [value] * 3
        )


def test_sums_are_on_every_rank() -> None:
    assert on_ranks(3, lambda shared, rank: shared.sum({"a": rank, "b": 1})) == [{"a": 3, "b": 3}] * 3


def test_ranks_that_would_do_the_same_agree() -> None:
    on_ranks(3, lambda shared, rank: shared.agree("work", {"seed": 0, "model": None}))


def test_a_rank_that_would_do_something_else_is_named_on_every_rank() -> None:
    """Before any of them goes on; the message says what differs, and what it is on rank 0."""

    def work(shared: SharedStore, rank: int) -> str:
        own = {"seed": 0, "decode.tau_conf": 0.3 if rank == 1 else 0.9} | ({"more": 1} if rank == 1 else {})
        with pytest.raises((ValueError, RankError)) as caught, shared.failures.guard():
            shared.agree("work", own)
        return str(caught.value)

    said = (
        f"rank 1 on {socket.gethostname()} would not do the same as rank 0: decode.tau_conf is 0.3, on rank 0 0.9; "
        f"more is 1, on rank 0 None. {shared_store.SAME}"
    )
    assert on_ranks(3, work) == [said] * 3


def test_long_texts_of_replicas_are_gathered_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_store, "PART", 3)
    texts = ["a text with é in it", "", "xyz"]
    assert on_ranks(3, lambda shared, rank: shared.gather(texts[rank], rank, 3)) == [texts] * 3


def test_a_rank_that_never_starts_is_not_waited_for_longer() -> None:
    with (
        joined(HashStore(), 0, 2) as shared,
        pytest.raises(LaunchError, match="1 of 2 ranks have joined; missing: rank 1, after 0 s"),
    ):
        shared.join(0.1)


def test_who_is_awaited_is_said_now_and_then(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(neighbours, "WORD_S", 0.1)
    with joined(HashStore(), 1, 9) as shared, pytest.raises(LaunchError):
        shared.join(0.25)
    said = (
        "1 of 9 ranks have joined; missing: rank 0, rank 2, rank 3, rank 4, rank 5 and 3 more, after 0 s; still waiting"
    )
    assert 1 <= sum(message.startswith(said) for message in caplog.messages) <= 2


def test_an_error_before_joining_ends_the_others_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where one node cannot read the input."""
    store = HashStore()
    monkeypatch.setattr(failures, "rendezvous", lambda world, meeting: store)
    announce_before_joining(World("torchrun", 1, 2), ValueError("task.input=x: no such file"), 5.0)
    with joined(store, 0, 2) as shared, pytest.raises(RankError, match=r"^rank 1: ValueError: task\.input=x: no such"):
        shared.join(60.0)


@pytest.mark.parametrize(
    ("key", "error"), [(keys.FAILED, RankError), (keys.EARLY, Stopped)], ids=["failed", "stopped early"]
)
def test_a_rank_that_left_is_not_waited_for(key: str, error: type[Exception]) -> None:
    store = HashStore()
    store.set(key, "what it said")
    with joined(store, 1, 2) as shared:
        with pytest.raises(error, match="what it said"):
            shared.barrier(keys.READY)
        with pytest.raises(error, match="what it said"):
            shared.broadcast("name", "")


def test_a_rank_that_stopped_in_order_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where this rank was reading its input all the while."""
    store = HashStore()
    store.set(keys.EARLY, "stopped by SIGUSR1 before the first step")
    with joined(store, 1, 2) as shared:
        shared.failures.heart.overdue = [0]
        with pytest.raises(Stopped, match="SIGUSR1"):
            shared.barrier(keys.READY)


def test_other_ranks_are_looked_at_while_items_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_store, "LOOK_S", 0.0)
    store = HashStore()
    with joined(store, 1, 2) as shared:
        items = shared.between(range(9))
        assert [next(items), next(items)] == [0, 1]
        store.set(keys.FAILED, "rank 0: no such file")
        with pytest.raises(RankError, match="no such file"):
            list(items)
    with joined(HashStore(), 0, 1) as shared:
        assert list(shared.between("abc")) == [*"abc"]
