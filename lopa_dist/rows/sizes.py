"""How many rows a sequence has: in one step, usually, and at most. Scheduler, memory and buffers ask here."""

from __future__ import annotations

import numpy as np

from lopa_dist.decode.config import DecodeConfig
from lopa_dist.decode.state import HostState, State
from lopa_dist.ragged import Ints
from lopa_dist.rows.causal_rows import Lookahead, rows_on_rank
from lopa_dist.rows.layout import KINDS
from lopa_dist.rows.structure import row_span

USUAL_BLOCKS = 2
"""Assumed blocks of a window if their number is not bounded. It affects the sizes of buffers and tiles only."""


def window_blocks(config: DecodeConfig) -> int:
    """Return how many blocks a window usually has."""
    return config.max_active_blocks or USUAL_BLOCKS


def usual_rows(config: DecodeConfig) -> int:
    """Return how many rows a sequence usually has in a step, of all its branches and drafts.

    Its prompt's rows are not counted: with ``context=vanilla`` they run in every step, otherwise in few.
    """
    if config.causal:  # the pending token, its drafts, and masks behind them; drafts and masks of each path
        return 1 + 2 * config.max_drafts * config.max_branches
    window = config.block_size * window_blocks(config) if config.stores_kv else config.max_new_tokens
    return config.max_branches * most_branch_rows(config, window)


def most_branch_rows(config: DecodeConfig, window: int) -> int:
    """Return the most rows of a branch whose window has `window` rows, those behind the window included.

    The kinds of rows are asked how many they have of a sequence with all branches and drafts, and a window of nothing
    but masks.
    """
    if config.causal:
        return window
    most = dict.fromkeys(("end", "limit", "masked"), config.max_new_tokens)
    most |= {"branches": config.max_branches, "drafts": config.max_edits + config.max_drafts, "starts_masked": 1}
    host = HostState(*(np.array([most.get(field, 0)]) for field in HostState._fields))
    return window + int(sum(kind(config, host).count[0] for kind in KINDS))


def stack_rows(config: DecodeConfig, branches: int) -> int:
    """Return how many rows the windows of `branches` branches, which attend in one stack, usually have."""
    return branches * most_branch_rows(config, config.block_size * window_blocks(config))


def longest_sequence(config: DecodeConfig, prompt: int) -> int:
    """Return the most tokens of a sequence whose prompt has `prompt` tokens, with the rows of its drafts."""
    return most_branch_rows(config, prompt + config.max_new_tokens + config.block_size)


def most_rows(config: DecodeConfig, branches: int, prompt: int, suffix: int = 0) -> int:
    """Return the most rows of one sequence in a forward on one rank.

    With `keeps_kv` its prompt is computed with the anchor alone. Later a window has the row before it, and the answer
    behind the committed tokens: as many blocks as may be active, which may all be completed in one step, and as many
    after them.

    Args:
        config: of the step.
        branches: of the sequence on this rank.
        prompt: tokens of its prompt that go through the model at once, and of its suffix.
        suffix: tokens behind its answer, all of which is seen then.
    """
    longest = longest_sequence(config, prompt)
    window = config.max_new_tokens + config.block_size + 1
    if config.max_active_blocks and not suffix:
        window = min(window, 2 * config.max_active_blocks * config.block_size + 1)
    if not config.keeps_kv:
        window = longest - suffix
    return max(longest, branches * most_branch_rows(config, window + suffix))


def usual_forward(config: DecodeConfig, branches: int, sequences: int, longest: int, limit: int) -> int:
    """Return how many rows a forward on one rank hardly ever exceeds.

    These are the rows of all sequences, or of one that is larger than the limit. A sequence has its prompt and one
    window, later a window in every branch: active blocks, and one more that was completed, or the row before them.
    Without `keeps_kv`, a window is all of the sequence.

    Args:
        config: of the step.
        branches: of a sequence on this rank.
        sequences: that run at once.
        longest: tokens of the longest of them, from `longest_sequence`.
        limit: rows of a forward that holds more than one sequence.
    """
    window = usual_window(config) if config.keeps_kv else longest
    each = max(longest, branches * most_branch_rows(config, window))
    return min(sequences * each, max(limit, each))


def usual_predictions(config: DecodeConfig, branches: int, sequences: int) -> int:
    """Return how many predictions a forward on one rank hardly ever exceeds: its branches' windows and drafts.

    Args:
        config, branches, sequences: as of `usual_forward`.
    """
    if config.causal:
        return sequences * usual_rows(config)
    window = usual_window(config) if config.keeps_kv else config.max_new_tokens
    return sequences * branches * most_branch_rows(config, window)


def usual_window(config: DecodeConfig) -> int:
    """Return the rows of a window that are usual at most: active blocks, and one that was just finished."""
    return config.block_size * (window_blocks(config) + 1)


def rows_in_step(state: State, host: HostState, lookahead: Lookahead, ranks: int) -> Ints:
    """Return the rows of each sequence in a step on the rank that has the most of them, ``[S]``.

    Rows of prompts that are prefilled in segments of their own are not counted.

    Args:
        state, host: of the same step.
        lookahead: of a causal model's step.
        ranks: of the branch group.
    """
    if state.config.causal:
        return rows_on_rank(host, lookahead, ranks)
    begin, stop = row_span(state, host)
    rows: Ints = stop - begin + sum(kind(state.config, host).count for kind in KINDS)
    return rows * -(-host.branches // ranks)
