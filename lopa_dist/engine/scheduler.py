"""Which sequences are in flight, and which of them take part in a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lopa_dist.decode import Lengths, State
from lopa_dist.decode.config import DecodeConfig
from lopa_dist.decode.layout import prompts_apart, row_span
from lopa_dist.decode.state import known
from lopa_dist.engine.kv_pool import KVPool
from lopa_dist.engine.request import Request
from lopa_dist.ragged import Ints


class Scheduler:
    """Decides from what every branch rank knows alike, so that all decide the same.

    `max_rows` bounds the rows of a forward on one rank (null: no bound), and with them its memory. Sequences that do
    not fit wait for another step; a sequence that is larger than the bound runs alone.
    """

    def __init__(
        self, pool: KVPool, config: DecodeConfig, max_rows: int | None, ranks: int, prefix_cache: str = "exact"
    ) -> None:
        self.pool, self.config, self.max_rows, self.ranks = pool, config, max_rows, ranks
        self.prefix_cache, self.cuts = prefix_cache, cuts_prefix(config, prefix_cache)
        self.cached = config.cache != "none"
        self.last_run = np.zeros(len(pool.bases), np.int64)  # the step in which each slot ran last
        self.step = 0

    def fits(self, slot: int, request: Request) -> bool:
        """Give the slot its K/V space, if there is enough."""
        if not self.cached:
            return True
        lead = request.prompt[: self.lead(len(request.prompt), request.prefix)]
        return self.pool.allocate(slot, len(request.prompt) + request.max_new_tokens, tuple(lead))

    def lead(self, tokens: int, prefix: int) -> int:
        """How many of a prompt's tokens are its lead, of which the first `prefix` are those of many others, too.

        It follows from the request alone: so its text does not depend on what else there is. What depends on nothing
        behind it may serve all that begin alike: whole prompts that never see their answer, and whole blocks of those
        that are causal by blocks. A prefix that would see the rest of its prompt, only an approximate cache cuts off.
        """
        config = self.config
        if config.cache != "block" or self.prefix_cache == "none":
            return 0
        prompt = tokens - known(config, tokens)
        if not self.cuts:
            prefix = 0
        elif config.prompt_attention == "blocks":
            prefix -= prefix % config.block_size
        if 0 < prefix < prompt:
            return prefix
        return prompt if prompts_apart(config) else 0

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
        prefill = (lengths.committed < 0) & (lengths.branches > 0)
        leads = self.pool.leads
        begin, stop = row_span(state, lengths, self.pool.lead(np.arange(len(leads)), prefill))
        rows = (stop - begin) * -(-lengths.branches // self.ranks)
        if prefill.any():  # a lead that several wait for is counted for each: who will compute it is not known yet
            stored = np.array([self.pool.stored(slot) for slot in range(len(leads))])
            prompt = np.where(stored, 0, leads) + (lengths.prompt - leads) * prompts_apart(self.config)
            rows += np.where(prefill, prompt, 0)
        if rows.sum() <= self.max_rows:
            return None
        order = np.lexsort((self.last_run, prefill, rows == 0))
        fitting = np.cumsum(rows[order]) <= self.max_rows
        fitting[0] = True
        chosen: Ints = np.sort(order[fitting & (rows[order] > 0)])
        self.last_run[chosen] = self.step
        return chosen


def cuts_prefix(config: DecodeConfig, prefix_cache: str) -> bool:
    """Whether a prompt's K/V are kept up to the end of its `Request.prefix`, for others that begin with it.

    Raises:
        ValueError: an approximate cache where nothing is cached for good.
    """
    if prefix_cache == "approximate" and config.cache != "block":
        raise ValueError(
            f"engine.prefix_cache=approximate needs decode.cache=block: with decode.cache={config.cache}, prompts are "
            "computed anew"
        )
    return prefix_cache == "approximate" or (
        prefix_cache == "exact" and config.cache == "block" and config.prompt_attention == "blocks"
    )


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
