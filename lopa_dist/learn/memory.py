"""How many masks a learning step may have in memory beside the model, and whether layers keep only their inputs."""

from __future__ import annotations

from lopa_dist.learn.predictions import ROWS as HEAD_ROWS
from lopa_dist.models.config import ModelConfig

FEWEST_MASKS = 4  # of a group
SHARE = 0.8  # of the free memory; the rest allows for fragmentation
WHOLE = 0.25  # of a CPU's free memory: if a step with all that layers compute needs more, they keep only their inputs
FP32 = 4


def bytes_of_adapter(config: ModelConfig, rank: int) -> int:
    """Return the bytes of an adapter in training: its weights, two forms of their gradients, and the momentum."""
    d, heads, kv = config.hidden_size, config.heads * config.head_dim, config.kv_heads * config.head_dim
    wide = 0 if config.experts is not None else config.intermediate_size
    sides = (d + heads) + 2 * (d + kv) + (heads + d) + (3 * (d + wide) if wide else 0)
    return 4 * FP32 * rank * sides * config.layers


def bytes_of_row(config: ModelConfig, longest: int, element: int, by_layer: bool = True) -> int:
    """Return the bytes that a mask takes in a step.

    Args:
        config: the model's.
        longest: tokens of the longest text that it may see.
        element: bytes per number of the weights.
        by_layer: whether layers keep only their inputs; otherwise they keep all that they compute.
    """
    d, heads, kv = config.hidden_size, config.heads * config.head_dim, config.kv_heads * config.head_dim
    kept = config.layers * d
    within = 8 * d + 3 * heads + 4 * kv + 5 * config.intermediate_size  # of one layer, with its gradients
    scores = 4 * config.heads * longest  # before and after the softmax, with gradients
    return element * (kept + (within + scores) * (1 if by_layer else config.layers))


def text_tokens(rows: int, longest: int) -> int:
    """Return the most tokens, padding included, of the texts of a step with `rows` masks; a longest text always fits.

    Texts that have groups after at least half of their positions stay below this number.
    """
    return longest + 2 * rows // FEWEST_MASKS


def bytes_of_step(config: ModelConfig, rows: int, longest: int, element: int, by_layer: bool = True) -> int:
    """Return the bytes of a step, without the adapter."""
    numbers = 2 * config.layers * config.kv_heads * config.head_dim + 8 * config.hidden_size  # of a token
    clean = text_tokens(rows, longest) * (numbers + 3 * config.intermediate_size) * element
    head = 3 * FP32 * min(rows, HEAD_ROWS) * config.vocab_size
    return rows * bytes_of_row(config, longest, element, by_layer) + clean + head


def rows_that_fit(config: ModelConfig, free: int, rank: int, longest: int, element: int, most: int, least: int) -> int:
    """Return how many masks a step has: `most`, halved until it fits, but at least `least`.

    Args:
        config: the model's.
        free: free bytes.
        rank: the adapter's.
        longest: tokens of the longest text.
        element: bytes per number of the weights.
        most, least: bounds.
    """
    room = SHARE * free - bytes_of_adapter(config, rank)
    rows = most
    while rows > least and bytes_of_step(config, rows, longest, element) > room:
        rows //= 2
    return max(rows, least)
