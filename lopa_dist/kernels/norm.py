"""Root-mean-square normalisation, alone and with the residual sum in front of it."""

from __future__ import annotations

import torch
from torch import Tensor

from lopa_dist.kernels.dispatch import fused


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension in fp32 and scale it: ``x [..., d], weight [d]`` -> ``[..., d]`` in x's dtype."""
    wide = x.float()
    scaled = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return scaled * weight if torch.is_grad_enabled() else scaled.mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``rms_norm(residual + x)`` and the sum itself, both ``[R, d]``, from ``x, residual [R, d], weight [d]``.

    The sum is rounded to x's dtype before it is normalised, in both forms. All three have one dtype.
    """
    if fused(x):
        from lopa_dist.kernels import rows_triton

        return rows_triton.add_rms_norm(x, residual, weight, eps)
    total = residual + x
    return rms_norm(total, weight, eps), total
