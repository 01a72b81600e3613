"""Which requests get a slot, and which sequences take part in a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lopa_dist.decode import HostState, State
from lopa_dist.decode.config import DecodeConfig
from lopa_dist.engine.kv_pool import KVPool
from lopa_dist.engine.prefix_rules import PrefixRules
from lopa_dist.engine.request import Request
from lopa_dist.ragged import Ints
from lopa_dist.rows.lookahead import Lookahead
from lopa_dist.rows.row_maker import RowMaker
from lopa_dist.rows.share import Share


class Scheduler:
    """Chooses from what every branch rank knows, so that all ranks choose the same.

    `max_rows` bounds the rows of a forward on one rank, and so its memory (None: no bound). Sequences that do not fit
    wait for another step; a sequence that is larger than the bound runs alone. `row_maker` is the rule's.
    """

    def __init__(
        self,
        pool: KVPool,
        config: DecodeConfig,
        row_maker: RowMaker,
        max_rows: int | None,
        share: Share,
        prefix_rules: PrefixRules,
    ) -> None:
        self.pool, self.config, self.row_maker, self.prefix_rules = pool, config, row_maker, prefix_rules
        self.max_rows, self.share = max_rows, share
        self.last_run = np.zeros(len(pool.base), np.int64)  # the step in which each slot ran last
        self.step = 0

    def allocate(self, slot: int, request: Request) -> bool:
        """Give a slot the K/V space that a request needs; return False if too little is free."""
        if not self.config.scope.caches_kv:
            return True
        prefix = request.prompt[: self.prefix_rules.shared(len(request.prompt), request.prefix)]
        return self.pool.allocate(slot, request.all_tokens, tuple(prefix))

    def free(self, slot: int) -> None:
        """Free the K/V space of a slot whose sequence is finished."""
        if self.config.scope.caches_kv:
            self.pool.free(slot)

    def choose(self, state: State, host: HostState, lookahead: Lookahead, waiting: Sequence[int] = ()) -> Ints | None:
        """Return the slots of the next step in ascending order; None for all.

        Args:
            state, host: of all slots.
            lookahead: of a causal model's next step.
            waiting: slots that cannot take part.

        Windows go before prefills, and within each kind those that have waited longest go first. No sequence starves,
        because every window finishes.
        """
        self.step += 1
        if self.max_rows is None and not waiting:
            return None
        prefill = host.waits_for_prefill
        rows = self.row_maker.in_step(state, host, lookahead, self.share)
        if self.config.scope.prefills_apart and prefill.any():
            # a prefix that several sequences wait for is counted for each: any of them may have to compute it
            stored = np.array([self.pool.stored(slot) for slot in range(state.slots)])
            rows += np.where(prefill, host.prompt - np.where(stored, self.pool.prefix_length, 0), 0)
        rows[list(waiting)] = 0
        limit = rows.sum() if self.max_rows is None else self.max_rows
        if rows.sum() <= limit and not waiting:
            return None
        order = np.lexsort((self.last_run, prefill, rows == 0))
        fitting = np.cumsum(rows[order]) <= limit
        fitting[0] = True
        chosen: Ints = np.sort(order[fitting & (rows[order] > 0)])
        self.last_run[chosen] = self.step
        return chosen
