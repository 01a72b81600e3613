"""How many rows a sequence has in a step."""

from __future__ import annotations

from lopa_dist.decode.config import DecodeConfig

USUAL_BLOCKS = 2
"""Assumed blocks of a window if their number is not bounded. It affects the sizes of buffers and tiles only."""


def window_blocks(config: DecodeConfig) -> int:
    """Return how many blocks a window usually has."""
    return config.max_active_blocks or USUAL_BLOCKS


def usual_rows(config: DecodeConfig) -> int:
    """Return how many rows a sequence usually has in a step, of all its branches and drafts.

    Those of its prompt are not counted: with ``context=vanilla`` they run in every step, else in few.
    """
    if config.causal:
        return 1 + config.max_chain * (1 + config.groups)  # the pending token, its drafts, and masks behind them
    window = config.max_new_tokens if config.cache == "none" else config.block_size * window_blocks(config)
    return config.max_branches * (window + 2 * config.extra_drafts)
