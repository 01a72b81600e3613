"""What lies between products, row by row: norms, alone and with the residual sum in front, and SwiGLU's gate."""

from __future__ import annotations

import torch
import torch.nn.functional as F
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
    if fused(x, "norm"):
        from lopa_dist.kernels import rows_triton

        return rows_triton.add_rms_norm(x, residual, weight, eps)
    total = residual + x
    return rms_norm(total, weight, eps), total


def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of one projection's ``gate_up [R, 2 I]``, the gates first -> ``[R, I]``.

    On a CPU the result takes the place of the gates.
    """
    if fused(gate_up, "swiglu"):
        from lopa_dist.kernels import rows_triton

        return rows_triton.swiglu(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate, inplace=True).mul_(up)
