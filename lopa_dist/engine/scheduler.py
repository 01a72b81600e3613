"""Which requests get a slot, and which sequences take part in a step."""

from __future__ import annotations

import numpy as np

from lopa_dist.decode import HostState, State
from lopa_dist.decode.config import DecodeConfig
from lopa_dist.decode.draft_rows import drafts_with_rows
from lopa_dist.decode.prefill import prefill_apart
from lopa_dist.decode.state import known_tokens
from lopa_dist.decode.structure import row_span
from lopa_dist.engine.kv_pool import KVPool
from lopa_dist.engine.request import Request
from lopa_dist.ragged import Ints


class Scheduler:
    """Decides from what every branch rank knows, so that all ranks decide the same.

    `max_rows` bounds the rows of a forward on one rank, and so its memory (None: no bound). Sequences that do not fit
    wait for another step; a sequence that is larger than the bound runs alone.
    """

    def __init__(self, pool: KVPool, config: DecodeConfig, max_rows: int | None, ranks: int, prefix_cache: str) -> None:
        self.pool, self.config, self.max_rows, self.ranks = pool, config, max_rows, ranks
        self.prefix_cache, self.cuts = prefix_cache, cuts_prefix(config, prefix_cache)
        self.last_run = np.zeros(len(pool.base), np.int64)  # the step in which each slot ran last
        self.step = 0

    def fits(self, slot: int, request: Request) -> bool:
        """Give a slot the K/V space that a request needs; return False where there is too little."""
        if not self.config.stores_kv:
            return True
        prefix = request.prompt[: self.shared_prefix(len(request.prompt), request.prefix)]
        return self.pool.allocate(slot, len(request.prompt) + request.max_new_tokens, tuple(prefix))

    def shared_prefix(self, tokens: int, prefix: int) -> int:
        """Return how many first tokens of a prompt have K/V that other requests may use.

        The number follows from the request alone, so that its text does not depend on what else is running. What
        depends on nothing behind it may serve all prompts that begin alike: whole prompts that never see their answer,
        and whole blocks of prompts that are block-causal. Only an approximate cache cuts off a prefix that would see
        the rest of its prompt.

        Args:
            tokens: of the prompt.
            prefix: how many of them are those of many other prompts, too (`Request.prefix`).
        """
        config = self.config
        if not config.keeps_kv or self.prefix_cache == "none":
            return 0
        prompt = tokens - known_tokens(config, tokens)
        if not self.cuts:
            prefix = 0
        elif config.prompt_attention == "blocks":
            prefix -= prefix % config.block_size
        if 0 < prefix < prompt:
            return prefix
        return prompt if prefill_apart(config) else 0

    def leave(self, slot: int) -> None:
        """Free the K/V space of a slot whose sequence is finished."""
        if self.config.stores_kv:
            self.pool.free(slot)

    def choose(self, state: State, host: HostState) -> Ints | None:
        """Return the slots of the next step in ascending order; None for all.

        Windows go before prefills, and among either those that have waited longest go first. So no sequence starves,
        for windows come to an end.
        """
        self.step += 1
        if self.max_rows is None:
            return None
        prefill = (host.committed < 0) & (host.branches > 0)
        prefix_length = self.pool.prefix_length
        begin, stop = row_span(state, host, self.pool.shared_prefixes(np.arange(len(prefix_length)), prefill))
        rows = (stop - begin + 2 * drafts_with_rows(self.config, host)) * -(-host.branches // self.ranks)
        if prefill.any():  # a prefix that several wait for is counted for each: who computes it is not known yet
            stored = np.array([self.pool.stored(slot) for slot in range(len(prefix_length))])
            prompt = np.where(stored, 0, prefix_length) + (host.prompt - prefix_length) * prefill_apart(self.config)
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
    """Return whether a prompt's K/V are shared up to the end of its `Request.prefix`.

    Raises:
        ValueError: an approximate cache where nothing is cached for good.
    """
    if prefix_cache == "approximate" and not config.keeps_kv:
        raise ValueError(
            f"engine.prefix_cache=approximate needs decode.cache=block: with decode.cache={config.cache}, prompts are "
            "computed anew"
        )
    return prefix_cache == "approximate" or (
        prefix_cache == "exact" and config.keeps_kv and config.prompt_attention == "blocks"
    )
