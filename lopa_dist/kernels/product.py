"""Products with a model's weights, which lie by columns on a CPU in fp32: in C there, else the library's."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lopa_dist.kernels import native
from lopa_dist.kernels.dispatch import in_c


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x [R, K] weight [K, N]``, ``[R, N]``, plus ``bias [N]``."""
    if in_c(x) and weight.stride(1) == 1 and x.stride(1) == 1:
        return native.product(x, weight, bias)
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


class Linear(nn.Linear):
    """A projection by `product`."""

    def forward(self, x: Tensor) -> Tensor:
        """``[..., K] -> [..., N]``."""
        if x.dim() == 2 and self.weight.stride(0) == 1 and in_c(x):
            return native.product(x, self.weight.t(), self.bias)
        return super().forward(x)
