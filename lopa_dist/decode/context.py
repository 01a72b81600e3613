"""What rows see of a text, and which keys and values a step takes from an earlier one: a table of contexts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from lopa_dist.ragged import UNBOUNDED, Ints

if TYPE_CHECKING:  # options are read without torch, which takes seconds to import
    from torch import Tensor


class Part(NamedTuple):
    """Tokens of a given answer that are scored together; places are counted from the prompt's first token."""

    begin: int  # place of the first row that is computed anew for each mask
    first: int  # place of the first token
    end: int  # place after the last token


IntsOrTensor = TypeVar("IntsOrTensor", Ints, "Tensor")


def end_of(attention: str, position: Ints, size: int) -> Ints | int:
    """Return the position after the last one that each row sees: ``[R]``, or one bound for all rows.

    Args:
        attention: `window_attention` or `prompt_attention` of a `Context`.
        position: ``[R]`` of the rows.
        size: of a block.
    """
    if attention in ("block_causal", "blocks"):
        return (position // size + 1) * size
    return {"full": UNBOUNDED, "self": 0}[attention] if attention != "causal" else position + 1


@dataclass(frozen=True)
class Context:
    """A row of `CONTEXTS`.

    "Before" and "after" are as seen from the window, which begins at the first block that has masks and ends with the
    last one that may be filled.
    """

    window_attention: str
    """A row of the window sees the whole window (full), nothing after its block (block_causal) or itself (causal)."""

    prompt_attention: str
    """A prompt's row sees the prompt (self), the window too (joint), or the prompt up to its own block (blocks) or to
    itself (causal). With blocks and causal, blocks are counted from the prompt's first token. With joint and a block
    cache, it sees the window of the first forward, and no later one."""

    boundary: str
    """How models with the logit shift predict the window's first position: from the row before it, which is cached.

    - fresh: that row is computed anew in every step, unless nothing that it sees can have changed.
    - stale: what it predicted in the forward that filled the cache holds until the position is filled.
    - fill: the forward that fills the cache fills this position and no other (Fast-dLLM's rule)."""

    cache: str
    """Which K/V a step takes from an earlier one.

    - none: no K/V; all rows of a sequence run in every step.
    - block: K/V of all tokens before the window. The forward after a block becomes complete computes the block's K/V
      once and for all.
    - dual: K/V of all tokens before the window and of the masks after it. The forward after a block becomes complete
      computes all K/V of the sequence anew.

    With block, rows see only the masks of appended blocks; otherwise they see those of the whole answer."""

    max_active_blocks: int | None
    """The value of ``max_active_blocks=auto``."""

    summary: str
    """What is cached, in words."""

    @property
    def causal(self) -> bool:
        """Whether a row sees nothing after itself, so that verification is exact (`rules.causal`)."""
        return self.window_attention == "causal"

    @property
    def by_blocks(self) -> bool:
        """Whether a window's row sees nothing after its block: K/V of complete blocks are the same in every branch."""
        return self.window_attention == "block_causal"

    @property
    def from_prompt(self) -> bool:
        """Whether blocks are counted from the prompt's first token; then an answer's last block has its full length."""
        return self.prompt_attention == "blocks"

    @property
    def caches_kv(self) -> bool:
        """Whether a step takes any K/V from an earlier one."""
        return self.cache != "none"

    @property
    def kv_is_final(self) -> bool:
        """Whether cached K/V, of prompts and complete blocks, are computed once and final; a dual cache renews them."""
        return self.cache == "block"

    @property
    def caches_masks_after(self) -> bool:
        """Whether a step takes K/V of the masks after the window from an earlier one, too."""
        return self.cache == "dual"

    @property
    def prefills_apart(self) -> bool:
        """Whether prompts never see their answer, so that they are prefilled in segments of their own."""
        return self.kv_is_final and self.prompt_attention != "joint"

    @property
    def cuts_prompts(self) -> bool:
        """Whether a prompt can be cut between any units, so that the K/V before the cut depend on nothing after it."""
        return self.kv_is_final and self.prompt_attention in ("blocks", "causal")

    def unit(self, size: int) -> int:
        """Return how many tokens see one another: one in causal models, else a block, of `size` tokens."""
        return 1 if self.causal else size

    def known(self, prompt: int, size: int) -> int:
        """Return how many of a prompt's `prompt` tokens count as the answer's first ones (`HostState.known`)."""
        if self.causal:  # the last one, which predicts the first token of the answer
            return min(prompt, 1)
        return prompt % size if self.from_prompt else 0

    def last_end(self, limit: IntsOrTensor, size: int) -> IntsOrTensor:
        """Return where the last block ends in answers that end at `limit`.

        If blocks are counted from the prompt's first token, the last one has its full length, as in training. Its
        positions after the limit do not belong to the answer.
        """
        return -(-limit // size) * size if self.from_prompt else limit

    def opening(self, known: Ints, limit: Ints, suffix: Ints, size: int) -> tuple[Ints, Ints]:
        """Return the frontiers `complete` and `end` of sequences before their first step, ``[S]`` each.

        Args:
            known, limit, suffix: as in `HostState`, ``[S]`` each.
            size: of a block.
        """
        if self.causal:
            return known, known
        first_block = np.minimum(size, self.last_end(limit, size))
        # an answer that leads to a suffix is seen as a whole from the start
        return np.zeros_like(known), np.where(suffix > 0, limit, first_block)

    def columns(self, answer: int, size: int, drafts: int) -> int:
        """Return how many positions a canvas has for answers of `answer` tokens.

        Args:
            answer: tokens.
            size: of a block.
            drafts: the most that a branch verifies.
        """
        if self.causal:  # the last prompt token, the answer, and what drafts may lie after its end
            return answer + drafts + 2
        # twice the length, so that a window as wide as the batch's widest fits into the canvas of every sequence
        return 2 * -(-(answer + (size - 1) * self.from_prompt) // size) * size

    def sees(self, position: Ints, size: int) -> Ints | int:
        """Return the position after the last one that each row sees, ``[R]``, unless its segment ends before that.

        Args:
            position: ``[R]`` of the rows; those of prompts are negative.
            size: of a block.
        """
        in_window = end_of(self.window_attention, position, size)
        if self.prompt_attention == "joint" or position.min(initial=0) >= 0:
            return in_window
        return np.where(position < 0, end_of(self.prompt_attention, position, size), in_window)

    def parts(self, prompt: int, end: int, size: int, shift: int) -> list[Part]:
        """Return the parts in which a given answer is scored: the whole answer, or its blocks if none sees a later one.

        Args:
            prompt, end: tokens of the prompt, and of prompt and answer together.
            size: of a block.
            shift: 1 if the row before a token predicts it.
        """
        if end == prompt:
            return []
        if not self.by_blocks:
            # the row that predicts the first token sees the masks, too, as in decoding (boundary=fresh)
            begin = 0 if self.prompt_attention == "joint" else prompt if self.causal else prompt - shift
            return [Part(begin, prompt, end)]
        origin = 0 if self.from_prompt else prompt
        first = origin + (prompt - origin) // size * size
        return [Part(at, max(at, prompt), min(at + size, end)) for at in range(first, end, size)]

    def estimates(self, masks: int) -> int:
        """Return how many random masks of a text its likelihood needs: `masks`, but at most 1 if it is exact."""
        return min(masks, 1) if self.causal else masks

    def before(self, part: Part, prompt: int) -> int:
        """Return how many tokens before a part are computed apart from it.

        The part sees them, and they do not see the part.

        Args:
            part: of an answer.
            prompt: tokens of its prompt.
        """
        return 0 if self.prompt_attention == "joint" else max(part.begin, prompt)


CONTEXTS = {
    # Discrete diffusion forcing (arXiv 2508.09192): several blocks are decoded at a time, finished ones are cached.
    "d2f": Context("full", "self", "fresh", "block", None, "the prompt and complete blocks"),
    # The same with windows that are block-causal: K/V of complete blocks are the same in every branch.
    "d2f_causal": Context("block_causal", "self", "fresh", "block", None, "the prompt and complete blocks"),
    # The same as d2f in LoPA's released program: the prompt sees the first block, and the row before the window is not
    # computed anew.
    "lopa_released": Context("full", "joint", "stale", "block", None, "the prompt and complete blocks"),
    # Block diffusion (SDAR, Fast-dLLM v2): a block sees itself and what is before it, one block at a time.
    "blocks": Context("block_causal", "blocks", "fill", "block", 1, "the prompt and complete blocks"),
    # Every row sees all others, so K/V change with every token that is filled: nothing is cached.
    "vanilla": Context("full", "joint", "fresh", "none", None, "nothing"),
    # Fast-dLLM's dual cache (arXiv 2505.22618): vanilla, but K/V outside the window come from the forward after the
    # last block was completed.
    "dual": Context("full", "joint", "fill", "dual", None, "all but the window, anew after each block"),
    # Every row, a mask's row included, sees itself and the tokens before it.
    "causal": Context("causal", "causal", "fresh", "block", 1, "all verified tokens"),
}
"""The contexts, by their names in `DecodeConfig.context`."""
