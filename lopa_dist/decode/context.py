"""What rows see of a text, and whose keys and values a step takes from an earlier one: the rows of one table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Context:
    """A row of `CONTEXTS`.

    "Before" and "behind" are as seen from the window, which begins at the first block that has masks and ends with the
    last one that may be filled.
    """

    window_attention: str
    """A row of the window sees the whole window (full), nothing behind its block (block_causal) or itself (causal)."""

    prompt_attention: str
    """A prompt's row sees the prompt (self), the window too (joint), or the prompt up to its own block (blocks) or to
    itself (causal). With blocks and causal, blocks are counted from the prompt's first token. With joint and a block
    cache, it sees the window of the first forward, and no later one."""

    boundary: str
    """For models with the logit shift, whose first window position is predicted by the row before it, which is cached.

    That row is computed anew in every step, unless nothing that it sees can have changed (fresh); or what it predicted
    in the forward that filled the cache holds until the position is filled (stale); or that forward fills this one
    position and no other (fill, Fast-dLLM's rule)."""

    cache: str
    """Which K/V a step takes from an earlier one.

    - none: no K/V; all rows of a sequence run in every step.
    - block: those of all tokens before. The forward after a block was completed computes its K/V for good.
    - dual: those of all tokens before and of the masks behind. The forward after a block was completed computes all K/V
      of the sequence anew.

    With block, rows see the masks of the appended blocks only, otherwise those of the complete answer."""

    max_active_blocks: int | None
    """The value of ``max_active_blocks=auto``."""

    summary: str
    """What is cached, in words."""


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
    # Fast-dLLM's dual cache (arXiv 2505.22618): vanilla, but K/V outside the window are as old as its last block.
    "dual": Context("full", "joint", "fill", "dual", None, "all but the window, anew after each block"),
    # Every row, of a mask too, sees what is before it and itself.
    "causal": Context("causal", "causal", "fresh", "block", 1, "all verified tokens"),
}
"""The contexts, by their names in `DecodeConfig.context`."""
