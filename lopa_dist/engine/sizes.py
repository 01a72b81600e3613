"""How many rows a sequence has in a step, usually and at most: for memory plans, buffers and tiles."""

from __future__ import annotations

from lopa_dist.decode.config import DecodeConfig
from lopa_dist.kernels.tiles import causal_tile_rows, tile_rows_for
from lopa_dist.rows.share import Share
from lopa_dist.rows.window_rows import window_blocks
from lopa_dist.rules import rule_for


def usual_rows(config: DecodeConfig) -> int:
    """Return how many rows a sequence usually has in a step, all its branches and drafts included."""
    return rule_for(config).rows.usual(config)


def most_branch_rows(config: DecodeConfig, window: int) -> int:
    """Return the most rows of a branch whose window has `window` rows, those after the window included."""
    return rule_for(config).rows.of_branch(config, window)


def share_of(config: DecodeConfig, rank: int, ranks: int) -> Share:
    """Return the branches that a rank of a branch group runs."""
    return Share(rank, ranks, rule_for(config).rows.everywhere)


def tile_rows(config: DecodeConfig, branches: int, heads_per_kv: int, reproducible: bool = False) -> int:
    """Return how many rows a tile of meta-attention has.

    Args:
        config: of the step.
        branches: of a sequence on this rank.
        heads_per_kv: query heads of a K/V head.
        reproducible: whether a row's bits must be the same in any batch; then nothing but one branch's rows decides.

    Raises:
        ValueError: more heads than a tile takes.
    """
    if rule_for(config).rows.in_place:
        return causal_tile_rows(heads_per_kv)
    window = most_branch_rows(config, config.block_size * window_blocks(config))
    return tile_rows_for(heads_per_kv, window * (1 if reproducible else branches))  # branches attend in one stack


def longest_sequence(config: DecodeConfig, prompt: int) -> int:
    """Return the most tokens of a sequence whose prompt has `prompt` tokens, the rows of its drafts included."""
    return most_branch_rows(config, prompt + config.max_new_tokens + config.block_size)


def most_rows(config: DecodeConfig, branches: int, prompt: int, suffix: int = 0) -> int:
    """Return the most rows of one sequence in a forward on one rank.

    With `kv_is_final` its prompt is computed with the anchor alone. Later, a window has the row before it and the
    answer after the committed tokens: as many blocks as may be active, which may all be completed in one step, and as
    many again after them. Rows that are in no window, such as a causal model's, may run beside the prompt's
    (`RowMaker.apart`).

    Args:
        config: of the step.
        branches: of the sequence on this rank.
        prompt: tokens of its prompt that go through the model at once, and of its suffix.
        suffix: tokens after its answer; if there are any, all of the answer is seen.
    """
    longest = longest_sequence(config, prompt)
    window = config.max_new_tokens + config.block_size + 1
    if config.max_active_blocks and not suffix:
        window = min(window, 2 * config.max_active_blocks * config.block_size + 1)
    if not config.scope.kv_is_final:
        window = longest - suffix
    apart = prompt + rule_for(config).rows.apart(config, branches)
    return max(longest, branches * most_branch_rows(config, window + suffix), apart)


def usual_forward(config: DecodeConfig, branches: int, sequences: int, longest: int, limit: int) -> int:
    """Return how many rows a forward on one rank hardly ever exceeds.

    These are the rows of all sequences, or of one that is larger than the limit. A sequence has its prompt and one
    window at first, later a window in every branch: active blocks, and one more that was completed, or the row before
    them. Without `kv_is_final`, a window is the whole sequence.

    Args:
        config: of the step.
        branches: of a sequence on this rank.
        sequences: how many run at once.
        longest: tokens of the longest of them, from `longest_sequence`.
        limit: rows of a forward that holds more than one sequence.
    """
    window = usual_window(config) if config.scope.kv_is_final else longest
    each = max(longest, branches * most_branch_rows(config, window))
    return min(sequences * each, max(limit, each))


def usual_predictions(config: DecodeConfig, branches: int, sequences: int) -> int:
    """Return how many predictions a forward on one rank hardly ever exceeds: its branches' windows and drafts.

    Args:
        config, branches, sequences: as in `usual_forward`.
    """
    window = usual_window(config) if config.scope.kv_is_final else config.max_new_tokens
    return sequences * rule_for(config).rows.predictions(config, branches, window)


def usual_window(config: DecodeConfig) -> int:
    """Return the most rows that a window usually has: those of active blocks, and of one that was just completed."""
    return config.block_size * (window_blocks(config) + 1)
