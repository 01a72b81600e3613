"""Whether a CPU's matrix products give a row the same bits in any batch, which texts rely on.

MKL's code for AVX2 sums in another order if few rows are multiplied, unless its strict mode is on. Importing
`lopa_dist` turns that mode on, which costs no time. But it has no effect in a process that has multiplied matrices
before, and other libraries have no such mode, so this is checked, for each precision: on CPUs with AMX, the order of
sums in bf16 depends on the number of rows, and no mode changes that.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
import torch.nn.functional as F

from lopa_dist.ragged import ROW_TILE

log = logging.getLogger("lopa_dist")
WIDTHS = (64, 192, 512, 1024)
FAULT = (
    "this CPU's matrix products depend on how many rows there are, so texts may depend on the batch: set "
    "MKL_CBWR=AUTO,STRICT in the environment, or import lopa_dist before anything that uses torch"
)
REDUCED = (
    "this CPU's matrix products in {} depend on how many rows there are, so texts may depend on the batch, and those "
    "of a causal model on its drafts: set model.dtype=fp32 to avoid this"
)


@cache
def same_bits(dtype: torch.dtype = torch.float32) -> bool:
    """Return whether rows have the same bits in products of 1 to 4 tiles of rows as in one of 32 tiles."""
    generator = torch.Generator().manual_seed(0)
    for width in WIDTHS:
        x, weight = (torch.randn(n, width, generator=generator).to(dtype) for n in (32 * ROW_TILE, width))
        for laid_out in (weight, weight.t().contiguous().t()):  # stored as the head's, then as the layers'
            full = F.linear(x, laid_out)
            for rows in range(ROW_TILE, 5 * ROW_TILE, ROW_TILE):
                if not torch.equal(F.linear(x[:rows], laid_out), full[:rows]):
                    return False
    return True


def fault(dtype: torch.dtype) -> str | None:
    """Return what is wrong with this CPU's products in a precision, and what to do; None: rows have the same bits."""
    if same_bits(dtype):
        return None
    return FAULT if dtype == torch.float32 else REDUCED.format(str(dtype).removeprefix("torch."))


@cache
def warn_of_bits(dtype: torch.dtype) -> None:
    """Warn once if a row's bits depend on its batch."""
    if found := fault(dtype):
        log.warning(found)
