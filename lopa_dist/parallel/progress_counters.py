"""Counters of a job's finished requests, added up over its data replicas for the display of rank 0."""

from __future__ import annotations

import time
from collections import Counter

from torch._C._distributed_c10d import Store

from lopa_dist.parallel import store_keys as keys

INTERVAL_S = 0.5
NAMES = ("done", "tokens", "forwards", "judged", "right")


class ProgressCounters:
    """The counters of `NAMES`; the leaders of all replicas add to them, and rank 0 reads the sums."""

    def __init__(self, store: Store, replicas: int, rank: int) -> None:
        self.store, self.replicas, self.rank = store, replicas, rank
        self._totals = dict.fromkeys(NAMES, 0)
        self._pending, self._written_at = Counter[str](), 0.0  # what the store does not have yet

    def add(self, **amounts: int) -> dict[str, int]:
        """Add to the counters and return them: on rank 0 the sums over all replicas.

        The store is written to once in `INTERVAL_S`, and when this is called without amounts: a round trip for each
        counter and request would take longer than what it counts.
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
