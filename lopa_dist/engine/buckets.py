"""The ladder of batch sizes that CUDA graphs are captured for (XY-Serve section 4; virtual padding).

Fine steps add few padded rows: above 128 rows less than a quarter, above 512 an eighth. For small batches they are
free anyway, because a step takes as long as reading the weights. Padded rows write no K/V and no result
(`static_runner`). Larger steps than the last run as many rows as they have, without a graph.
"""

from __future__ import annotations

STEPS = ((256, 32), (1024, 64), (2048, 128))
"""Pairs: a number of rows, and the step between sizes up to it."""
TOP = STEPS[-1][0]


def bucket(rows: int) -> int | None:
    """Return the smallest size of the ladder that holds `rows`; None above its top."""
    for top, step in STEPS:
        if rows <= top:
            return -(-max(rows, 1) // step) * step
    return None


def buffered(rows: int, real_rows_only: bool) -> int | None:
    """Return how many rows the fixed buffers of a step with `rows` rows have; None: it runs without them.

    Above the ladder only a network with `real_rows_only` needs them: it reads from one how many rows count.
    """
    return bucket(rows) or (rows if real_rows_only else None)


def hidden_rows(rows: int, real_rows_only: bool) -> int:
    """Return how many rows the buffer of hidden states has if no step has more than `rows`: at least the ladder's."""
    return max(buffered(rows, real_rows_only) or 0, TOP)


def ladder(top: int = TOP) -> list[int]:
    """Return all sizes up to `top`."""
    sizes, begin = [], 0
    for end, step in STEPS:
        sizes += list(range(begin + step, end + 1, step))
        begin = end
    return [size for size in sizes if size <= top]
