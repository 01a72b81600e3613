"""Linear layers whose number of real rows only the device knows: virtual padding (XY-Serve, section 4).

A CUDA graph freezes shapes, so the rows of a step are padded to a bucket's. This product reads the number of real rows
from the device and multiplies only those; pad rows may hold anything, even NaN, and take no part.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lopa_dist.kernels.dispatch import fused


def vgemm(x: Tensor, weight: Tensor, rows: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias`` for the first `rows` rows; a row's bits do not depend on how many there are.

    Args:
        x: ``[M, K]``.
        weight: ``[N, K]`` in x's dtype, or int8.
        rows: ``[1]`` int32 on x's device, at most M.
        bias: ``[N]`` or None.
        scale: ``[N]`` fp32, the factors of an int8 weight's rows.

    Returns:
        ``[M, N]`` in x's dtype; rows from `rows` on are undefined.

    Raises:
        ValueError: an int8 weight without a scale, or a scale with another weight.
    """
    if (weight.dtype == torch.int8) != (scale is not None):
        raise ValueError(f"vgemm: a weight of {weight.dtype} {'needs' if scale is None else 'takes no'} scale [N]")
    if fused(x, "vgemm"):
        from lopa_dist.kernels import virtual_gemm_triton

        return virtual_gemm_triton.vgemm(x, weight, rows, bias, scale)
    out = x.new_full((len(x), len(weight)), torch.nan)
    real = x[: int(rows)]
    if scale is None:
        out[: len(real)] = F.linear(real, weight, bias)
        return out
    product = F.linear(real.float(), weight.float()) * scale
    out[: len(real)] = (product if bias is None else product + bias.float()).to(x.dtype)
    return out
