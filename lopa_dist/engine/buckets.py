"""The ladder of batch sizes that CUDA graphs are captured for (XY-Serve section 4; virtual padding).

Fine steps keep the padded rows few: below the knee, where a step costs what reading the weights costs, they are free
anyway; above 128 rows less than a quarter is ever added, above 512 an eighth. The rows added write no K/V and no
result, see `static_runner`.

Above the ladder, steps run as many rows as they have, without a graph: launching them takes a tenth of their time.
"""

from __future__ import annotations

STEPS = ((256, 32), (1024, 64), (2048, 128))
"""Pairs: up to how many rows, and the step between sizes up to there."""
TOP = STEPS[-1][0]


def bucket(rows: int) -> int | None:
    """The smallest size of the ladder that holds `rows`; null above its top."""
    for top, step in STEPS:
        if rows <= top:
            return -(-max(rows, 1) // step) * step
    return None


def ladder(top: int = TOP) -> list[int]:
    """All sizes up to `top`."""
    sizes, begin = [], 0
    for end, step in STEPS:
        sizes += list(range(begin + step, end + 1, step))
        begin = end
    return [size for size in sizes if size <= top]
