"""Whether a CPU's matrix products give a row the same bits in any batch, which texts rely on.

MKL's code for AVX2 adds up in another order if few rows are multiplied, unless its strict mode is on. Importing
`lopa_dist` switches that on, which costs no time. It has no effect in a process that has multiplied matrices before,
and other libraries have no such mode, so it is checked.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
import torch.nn.functional as F

from lopa_dist.ragged import ROW_TILE

log = logging.getLogger("lopa_dist")
WIDTHS = (64, 192, 512)
FAULT = (
    "this CPU's matrix products depend on how many rows there are, so texts may depend on the batch: set "
    "MKL_CBWR=AUTO,STRICT in the environment, or import lopa_dist before anything that uses torch"
)


def same_bits() -> bool:
    """Return whether rows have the same bits in products of 1 to 4 tiles of rows as in one of 32 tiles."""
    generator = torch.Generator().manual_seed(0)
    for width in WIDTHS:
        x, weight = (torch.randn(n, width, generator=generator) for n in (32 * ROW_TILE, width))
        for laid_out in (weight, weight.t().contiguous().t()):  # as the head's is, and as layers' are
            full = F.linear(x, laid_out)
            for rows in range(ROW_TILE, 5 * ROW_TILE, ROW_TILE):
                if not torch.equal(F.linear(x[:rows], laid_out), full[:rows]):
                    return False
    return True


@cache
def warn_of_bits() -> None:
    """Warn, once, if they do not."""
    if not same_bits():
        log.warning(FAULT)
