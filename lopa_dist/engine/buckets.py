"""The ladder of batch sizes that CUDA graphs are captured for (XY-Serve section 4; virtual padding).

Sizes are close together, so padding adds few rows: less than a quarter above 128 rows, less than an eighth above 512.
For small batches padding is free anyway, because a step takes as long as reading the weights. Padded rows write no K/V
and no result (`static_runner`). Steps above the largest size run exactly the rows that they have, without a graph.
"""

from __future__ import annotations

STEPS = ((256, 32), (1024, 64), (2048, 128))
"""Pairs of a number of rows and the distance between sizes up to it."""
TOP = STEPS[-1][0]


def bucket(rows: int) -> int | None:
    """Return the smallest size of the ladder that holds `rows`; None above the ladder's top."""
    for top, step in STEPS:
        if rows <= top:
            return -(-max(rows, 1) // step) * step
    return None


def buffered(rows: int, real_rows_only: bool) -> int | None:
    """Return how many rows the fixed buffers of a step with `rows` rows have; None: the step runs without buffers.

    Above the ladder only a network with `real_rows_only` needs buffers: it reads from one of them how many rows count.
    """
    return bucket(rows) or (rows if real_rows_only else None)


def hidden_rows(rows: int, real_rows_only: bool) -> int:
    """Return the rows of the buffer of hidden states if steps have at most `rows` rows: at least the ladder's top."""
    return max(buffered(rows, real_rows_only) or 0, TOP)


def ladder(top: int = TOP) -> list[int]:
    """Return the ladder's sizes up to `top`."""
    sizes, begin = [], 0
    for end, step in STEPS:
        sizes += list(range(begin + step, end + 1, step))
        begin = end
    return [size for size in sizes if size <= top]
