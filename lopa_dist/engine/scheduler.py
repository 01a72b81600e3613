"""Which sequences are in flight, and which of them take part in a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lopa_dist.decode import Lengths, State
from lopa_dist.decode.config import DecodeConfig
from lopa_dist.decode.layout import row_span
from lopa_dist.decode.state import known
from lopa_dist.engine.kv_pool import KVPool
from lopa_dist.engine.request import Request

Ints = NDArray[np.int64]


class Scheduler:
    """Decides from what every branch rank knows alike, so that all decide the same.

    `max_rows` bounds the rows of a forward on one rank (null: no bound), and with them its memory. Sequences that do
    not fit wait for another step; a sequence that is larger than the bound runs alone.
    """

    def __init__(self, pool: KVPool, config: DecodeConfig, max_rows: int | None, ranks: int) -> None:
        self.pool, self.config, self.max_rows, self.ranks = pool, config, max_rows, ranks
        self.cached = config.cache != "none"
        self.last_run = np.zeros(len(pool.bases), np.int64)  # the step in which each slot ran last
        self.step = 0

    def fits(self, slot: int, request: Request) -> bool:
        """Give the slot its K/V space, if there is enough.

        Requests with equal prompts share the prompt's, where it never sees the answer: so they have the same numbers.
        """
        if not self.cached:
            return True
        prompt = tuple(request.prompt[: len(request.prompt) - known(self.config, len(request.prompt))])
        shared = self.config.cache == "block" and self.config.prompt_attention != "joint"
        return self.pool.allocate(slot, len(request.prompt) + request.max_new_tokens, prompt if shared else ())

    def leave(self, slot: int) -> None:
        """The slot's sequence is finished."""
        if self.cached:
            self.pool.free(slot)

    def choose(self, state: State, lengths: Lengths) -> Ints | None:
        """The slots of the next step in ascending order, or null for all.

        Windows go before prefills, and those before others that have waited longest; so nobody starves, as windows end.
        """
        self.step += 1
        if self.max_rows is None:
            return None
        prefill = lengths.committed < 0
        begin, stop = row_span(state, lengths)
        rows = (stop - begin) * -(-lengths.branches // self.ranks)
        if rows.sum() <= self.max_rows:
            return None
        order = np.lexsort((self.last_run, prefill, rows == 0))
        fitting = np.cumsum(rows[order]) <= self.max_rows
        fitting[0] = True
        chosen: Ints = np.sort(order[fitting & (rows[order] > 0)])
        self.last_run[chosen] = self.step
        return chosen


def kv_budget(requests: Sequence[Request], slots: int, limit: int | None) -> int:
    """Tokens of K/V space: for the longest `slots` requests at once, or `limit` where that is less.

    Raises:
        ValueError: the longest request alone does not fit.
    """
    needs = sorted((len(r.prompt) + r.max_new_tokens for r in requests), reverse=True)
    if limit is None:
        return sum(needs[:slots])
    if needs[0] > limit:
        raise ValueError(
            f"engine.kv_tokens={limit}: a request needs {needs[0]}; raise it or shorten prompts or answers"
        )
    return min(limit, sum(needs[:slots]))
