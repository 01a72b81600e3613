"""Which first tokens of a prompt are computed once for all that begin with them, and in how many forwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lopa_dist.decode.config import DecodeConfig
from lopa_dist.decode.prefill import prefill_apart
from lopa_dist.decode.state import known_tokens
from lopa_dist.engine.request import Request


@dataclass(frozen=True)
class PrefixRules:
    """What is shared, and how it is computed, follows from a request alone, never from what else is running.

    So its text does not depend on that either.

    Args:
        config: `cache`, `prompt_attention` and `block_size` are read.
        prefix_cache, prefill_chunk: of `EngineConfig`.

    Raises:
        ValueError: an approximate cache where nothing is cached for good.
    """

    config: DecodeConfig
    prefix_cache: str
    prefill_chunk: int | None

    def __post_init__(self) -> None:
        _ = self.cuts  # which checks

    @cached_property
    def cuts(self) -> bool:
        """Whether a prompt's K/V are shared up to the end of its `Request.prefix`."""
        return cuts_prefix(self.config, self.prefix_cache)

    def shared(self, tokens: int, prefix: int) -> int:
        """Return how many first tokens of a prompt have K/V that other requests may use.

        What depends on nothing behind it may serve all prompts that begin alike: whole prompts that never see their
        answer, and whole blocks of prompts that are block-causal. Only an approximate cache cuts off a prefix that
        would see the rest of its prompt.

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

    @cached_property
    def chunk(self) -> int | None:
        """How many tokens of a shared prefix are computed in a forward at most; null: all of them, however many.

        Whole blocks, of prompts that are block-causal: what a forward computes then depends on nothing behind it.
        """
        causal = self.config.keeps_kv and self.config.prompt_attention == "blocks"
        if self.prefill_chunk is None or not causal or self.prefix_cache == "none":
            return None
        size = self.config.block_size
        return max(size, self.prefill_chunk - self.prefill_chunk % size)

    def chunks(self, tokens: int) -> int:
        """Return in how many chunks a shared prefix of so many tokens is computed; 0: with the rest of its prompt."""
        return -(-tokens // self.chunk) if self.chunk is not None and tokens > self.chunk else 0

    def most_rows(self, requests: Sequence[Request], longest: int) -> int:
        """Return the most tokens of one prompt that go through the model at once.

        Args:
            requests: not empty.
            longest: tokens of the longest prompt.
        """
        if self.chunk is None or longest <= self.chunk:
            return longest

        def rest(request: Request) -> int:
            tokens = len(request.prompt)
            shared = self.shared(tokens, request.prefix)
            return tokens - shared if self.chunks(shared) else tokens

        return max(self.chunk, *map(rest, requests))


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
