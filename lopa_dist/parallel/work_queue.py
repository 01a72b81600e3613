"""The queue of a job's requests, from which its data replicas take the next ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from lopa_dist.parallel import store_keys as keys
from lopa_dist.parallel.failures import Failures


class WorkQueue:
    """One counter for all replicas; the requests below it have been taken.

    Args:
        store: shared by all ranks.
        failures: what this rank knows of the others.
        replicas: how many data replicas there are. With one, the counter is its own.
        is_leader: whether this rank speaks for its replica.
        broadcast: gives the leader's tensor to all ranks of the replica.
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
        self._taken = 0  # requests that were taken when this rank last asked

    def take(self, most: int, total: int) -> list[int]:
        """Return the next indices of requests for this replica: at most `most`, all below `total`.

        Every rank of a replica calls this at the same step; its leader asks the store, and the others get the answer.

        Raises:
            RankError: another rank failed or was lost.
        """
        self.failures.check()
        if self._taken >= total:
            return []
        if self.replicas == 1:
            first = self._taken
            self._taken = min(total, first + most)
            return list(range(first, self._taken))
        indices = torch.zeros(most, dtype=torch.int64)
        if self.is_leader:
            last = self.store.add(keys.TAKEN, most)
            indices = torch.arange(last - most, last)
        own: list[int] = self.broadcast(indices).tolist()
        self._taken = own[-1] + 1
        return [index for index in own if index < total]
