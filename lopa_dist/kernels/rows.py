"""Row-wise operations between products: norms, alone and after a residual sum, and SwiGLU's gate."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from lopa_dist.kernels import native
from lopa_dist.kernels.dispatch import dense, fused, in_c
from lopa_dist.kernels.quantized import QuantizedRows, quantize_rows


@cache
def number(value: float) -> Tensor:
    """Return `value` as a tensor. torch converts a Python number in every operation, which takes about 2 us."""
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=torch.float32)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``x [..., d]`` normalised over its last dimension in fp32 and scaled by ``weight [d]``, in x's dtype."""
    wide = x.float()
    if torch.is_grad_enabled():
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight
    mean = torch.mul(wide, wide).sum(-1, keepdim=True).div_(number(x.shape[-1]))
    return torch.mul(wide, mean.add_(number(eps)).rsqrt_()).to(x.dtype).mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return ``rms_norm(residual + x)`` and the sum itself, both ``[R, d]``, from ``x, residual [R, d], weight [d]``.

    The sum is rounded to x's dtype before it is normalised, in every form. All three inputs have one dtype. Except in
    Triton's form, the sum overwrites x.
    """
    if fused(x, "norm"):
        from lopa_dist.kernels import rows_triton

        return rows_triton.add_rms_norm(x, residual, weight, eps)
    if in_c(x, weight, residual) and dense(x, weight, residual):
        return native.rms_norm(x, weight, eps, residual), x
    total = x.add_(residual)
    return rms_norm(total, weight, eps), total


def add_rms_norm_fp8(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[QuantizedRows, Tensor]:
    """Return `add_rms_norm`'s results, the norm quantised for an fp8 product, with the same bits as in two steps."""
    if fused(x, "norm") and fused(x, "fp8"):
        from lopa_dist.kernels import rows_triton

        eight, scale, total = rows_triton.add_rms_norm_fp8(x, residual, weight, eps)
        return QuantizedRows(eight, scale, x.dtype), total
    normed, total = add_rms_norm(x, residual, weight, eps)
    return quantize_rows(normed), total


def embed_rms_norm(tokens: Tensor, embedding: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the tokens' embeddings, normalised and as they are, both ``[R, d]``: ``tokens [R], embedding [V, d]``."""
    if fused(embedding, "norm"):
        from lopa_dist.kernels import rows_triton

        return rows_triton.embed_rms_norm(tokens, embedding, weight, eps)
    x = F.embedding(tokens, embedding)
    if in_c(x, weight) and dense(x, weight):
        return native.rms_norm(x, weight, eps), x
    return rms_norm(x, weight, eps), x


def swiglu(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up``, ``[R, I]``, of one projection's ``gate_up [R, 2 I]``, the gates first.

    In torch's form the result overwrites the gates.
    """
    if fused(gate_up, "swiglu"):
        from lopa_dist.kernels import rows_triton

        return rows_triton.swiglu(gate_up)
    if in_c(gate_up) and dense(gate_up):
        return native.swiglu(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate, inplace=True).mul_(up)


def swiglu_fp8(gate_up: Tensor) -> QuantizedRows:
    """Return `swiglu`'s result, quantised for an fp8 product, with the same bits as in two steps."""
    if fused(gate_up, "swiglu") and fused(gate_up, "fp8"):
        from lopa_dist.kernels import rows_triton

        return QuantizedRows(*rows_triton.swiglu_fp8(gate_up), gate_up.dtype)
    return quantize_rows(swiglu(gate_up))
