"""Which first tokens of a prompt are computed once for all prompts that begin with them, and in how many forwards."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from lopa_dist.decode.config import DecodeConfig


@dataclass(frozen=True)
class PrefixRules:
    """What is shared, and how it is computed. Both follow from a request alone, so no text depends on the batch.

    Args:
        config: its `scope` and `block_size` are read.
        prefix_cache, prefill_chunk: of `EngineConfig`.
    """

    config: DecodeConfig
    prefix_cache: str
    prefill_chunk: int | None

    def shared(self, tokens: int, prefix: int) -> int:
        """Return how many first tokens of a prompt have K/V that other requests may use.

        K/V that depend on nothing after them may serve all prompts that begin alike: complete prompts that never see
        their answer, complete blocks of block-causal prompts, and any beginning of causal ones. If the rest is longer
        than a chunk, all of the prompt is shared, because only shared prefixes are computed in chunks.

        Args:
            tokens: of the prompt.
            prefix: how many of its first tokens many other prompts begin with, too (`Request.prefix`).
        """
        scope = self.config.scope
        if not scope.prefills_apart or self.prefix_cache == "none":
            return 0
        prompt = tokens - scope.known(tokens, self.config.block_size)
        if not self.cuts:
            prefix = 0
        prefix -= prefix % self.unit
        if 0 < prefix < prompt and (self.chunk is None or prompt - prefix <= self.chunk):
            return prefix
        return prompt

    @cached_property
    def cuts(self) -> bool:
        """Whether what is shared may end within a prompt (`cuts_prefix`)."""
        return cuts_prefix(self.config, self.prefix_cache)

    @cached_property
    def unit(self) -> int:
        """How many tokens see one another: a block, or one in causal models. Prompts are cut between units."""
        return self.config.scope.unit(self.config.block_size)

    @cached_property
    def chunk(self) -> int | None:
        """The most tokens of a shared prefix that are computed in a forward; None: no bound.

        Only prompts that are causal, by blocks or by tokens, have chunks: no unit depends on what comes after it.
        """
        if self.prefill_chunk is None or not self.cuts:
            return None
        return max(self.unit, self.prefill_chunk - self.prefill_chunk % self.unit)

    def chunks(self, tokens: int) -> int:
        """Return how many chunks a prefix of `tokens` tokens has; 0: it is computed at once, in its prompt's step."""
        return -(-tokens // self.chunk) if self.chunk is not None and tokens > self.chunk else 0

    def at_once(self, longest: int) -> int:
        """Return the most tokens of one prompt that go through the model at once.

        These are a shared prefix of at most a chunk, and the rest of the prompt, which is at most a chunk, too.

        Args:
            longest: tokens of the longest prompt.
        """
        return longest if self.chunk is None else min(longest, 2 * self.chunk)


def cuts_prefix(config: DecodeConfig, prefix_cache: str) -> bool:
    """Return whether requests may share a prompt's K/V up to the end of `Request.prefix`.

    Tokens there see nothing after them.
    """
    return prefix_cache == "exact" and config.scope.cuts_prompts
