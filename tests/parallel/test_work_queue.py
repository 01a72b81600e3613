"""Replicas share out a job's requests: each is taken once, in order."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from lopa_dist.parallel import store_keys as keys
from lopa_dist.parallel.counters import WorkQueue
from lopa_dist.parallel.failures import Failures
from lopa_dist.parallel.launcher import World
from lopa_dist.parallel.mesh import Mesh
from lopa_dist.parallel.stop import Stop


def queue(store: HashStore, replicas: int, is_leader: bool = True, heard: list[Tensor] | None = None) -> WorkQueue:
    """A rank's queue; `heard` is what its leader broadcasts, which it adds to or takes from."""
    said = [] if heard is None else heard

    def broadcast(indices: Tensor) -> Tensor:
        if is_leader:
            said.append(indices)
        return indices if is_leader else said.pop(0)

    failures = Failures(store, World("python"), Mesh(1, 1), "solo", 5.0, Stop(5.0))
    return WorkQueue(store, failures, replicas, is_leader, broadcast)


@given(st.integers(1, 4), st.integers(0, 20), st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=10))
def test_every_request_is_taken_once(replicas: int, total: int, calls: list[tuple[int, int]]) -> None:
    store = HashStore()
    queues = [queue(store, replicas) for _ in range(replicas)]
    taken = []
    for replica, most in calls:
        own = queues[replica % replicas].take(most, total)
        assert len(own) <= most
        taken += own
    for each in queues:
        while own := each.take(2, total):
            taken += own
    assert taken == list(range(total))


def test_other_ranks_of_a_replica_get_the_leaders_indices() -> None:
    store = HashStore()
    heard: list[Tensor] = []
    leader, follower = queue(store, 2, True, heard), queue(store, 2, False, heard)
    store.add(keys.TAKEN.format(0), 3)  # another replica was first
    assert leader.take(2, 10) == follower.take(2, 10) == [3, 4]
    assert torch.equal(leader.broadcast(torch.tensor([1])), torch.tensor([1]))
