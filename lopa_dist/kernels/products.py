"""The ways to multiply a bucket's rows with a weight, by name: what a profile chooses among (XY-Serve, section 4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor

from lopa_dist.kernels.virtual_gemm import grouped_linear, vgemm

Product = Callable[[Tensor, Tensor, Tensor, "Tensor | None"], Tensor]
"""``(x [M, K], weight [N, K], rows [1] int32, bias [N] or null) -> [M, N]``"""
Choices = Mapping[tuple[int, int, int], str]
"""By (rows of the bucket, outputs, inputs), which of `PRODUCTS` to take where it is not the library's."""


def library(x: Tensor, weight: Tensor, rows: Tensor, bias: Tensor | None) -> Tensor:
    """The library's product of all rows, padding included."""
    return F.linear(x, weight, bias)


PRODUCTS: dict[str, Product] = {"library": library, "grouped": grouped_linear, "vgemm": vgemm}
