"""What a job's data replicas count together: requests taken from its queue, and finished requests."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from lopa_dist.parallel import store_keys as keys
from lopa_dist.parallel.failures import Failures

INTERVAL_S = 0.5
NAMES = ("done", "failed", "invalid", "tokens", "forwards", "judged", "right")


class WorkQueue:
    """The queue of a job's requests: one counter for all replicas; requests below it are taken.

    Args:
        store: shared by all ranks.
        failures: what this rank knows of the others.
        replicas: number of data replicas. With one, the counter is local.
        is_leader: whether this rank speaks for its replica.
        broadcast: returns the leader's tensor on all ranks of the replica.
    """

    def __init__(
        self,
        store: Store,
        failures: Failures,
        replicas: int,
        is_leader: bool,
        broadcast: Callable[[Tensor], Tensor],
    ) -> None:
        self.store, self.failures, self.replicas = store, failures, replicas
        self.is_leader, self.broadcast = is_leader, broadcast
        self._taken = self._first = 0  # requests taken when this rank last asked, and before this round
        self._round = 0

    def go_on(self, first: int) -> None:
        """Hand out the requests from number `first` on, once all ranks have taken those before.

        With several replicas, the counter runs beyond the last request of a round, so each round has its own counter.
        """
        self._taken = self._first = first
        self._round += 1

    def take(self, most: int, total: int) -> list[int]:
        """Return the indices of this replica's next requests: at most `most`, all below `total`.

        Every rank of a replica calls this at the same step; its leader asks the store, and the others get the answer.

        Raises:
            RankError: another rank failed or was lost.
        """
        self.failures.check_in_passing()
        if self._taken >= total:
            return []
        if self.replicas == 1:
            first = self._taken
            self._taken = min(total, first + most)
            return list(range(first, self._taken))
        indices = torch.zeros(most, dtype=torch.int64)
        if self.is_leader:
            last = self._first + self.store.add(keys.TAKEN.format(self._round), most)
            indices = torch.arange(last - most, last)
        own: list[int] = self.broadcast(indices).tolist()
        self._taken = own[-1] + 1
        return [index for index in own if index < total]


class ProgressCounters:
    """The counters of `NAMES`: the leaders of all replicas add to them, and rank 0 reads the sums for its display."""

    def __init__(self, store: Store, replicas: int, rank: int) -> None:
        self.store, self.replicas, self.rank = store, replicas, rank
        self._totals = dict.fromkeys(NAMES, 0)
        self._pending, self._written_at = Counter[str](), 0.0  # what the store does not have yet

    def add(self, **amounts: int) -> dict[str, int]:
        """Add to the counters and return them: on rank 0 the sums over all replicas.

        The store is written at most once per `INTERVAL_S`, and whenever this is called without amounts. A round trip
        for each counter and request would take longer than the work that is counted.
        """
        if self.replicas == 1:
            for name, amount in amounts.items():
                self._totals[name] += amount
            return self._totals
        self._pending.update(amounts)
        if amounts and time.monotonic() - self._written_at < INTERVAL_S:
            return self._totals
        for name, amount in self._pending.items():
            self.store.add(keys.PROGRESS.format(name), amount)
        self._pending.clear()
        self._written_at = time.monotonic()
        if self.rank == 0:
            self._totals = {name: self.store.add(keys.PROGRESS.format(name), 0) for name in NAMES}
        return self._totals
