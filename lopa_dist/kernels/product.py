"""Products with a model's weights, which on a CPU are stored by column: in C there, else by torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lopa_dist.kernels import native
from lopa_dist.kernels.dispatch import in_c


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, in_fp32: bool = False) -> Tensor:
    """Return ``x [R, K] @ weight [K, N] + bias [N]``, ``[R, N]``; with `in_fp32` in fp32."""
    if in_c(x, weight, bias) and weight.stride(1) == 1 and x.stride(1) == 1 and suits(x):
        return native.product(x, weight, bias, in_fp32)
    if in_fp32 and bias is None and x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(x, weight, out_dtype=torch.float32)  # not rounded, which would make many logits equal
    y = torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)
    return y.float() if in_fp32 else y


def suits(x: Tensor) -> bool:
    """Return whether the product in C takes rows of this width: in bf16 it multiplies pairs of numbers."""
    return x.dtype == torch.float32 or x.shape[1] % 2 == 0


class Linear(nn.Linear):
    """A linear layer whose products run in C where they can."""

    def forward(self, x: Tensor) -> Tensor:
        """Project ``[..., K] -> [..., N]``."""
        if x.dim() == 2 and self.weight.stride(0) == 1 and in_c(x, self.weight, self.bias) and suits(x):
            return native.product(x, self.weight.t(), self.bias)
        return super().forward(x)
