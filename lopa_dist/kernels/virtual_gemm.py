"""Linear layers whose number of real rows only the device knows: virtual padding (XY-Serve, section 4).

A CUDA graph freezes shapes, so the rows of a step are padded to a bucket's. This one reads how many are real from the
device and multiplies only those; pad rows may hold anything, NaN included, and take no part.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lopa_dist.kernels.dispatch import fused


def vgemm(x: Tensor, weight: Tensor, rows: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` of the first `rows` rows; a row's bits do not depend on how many there are.

    Args:
        x: ``[M, K]``.
        weight: ``[N, K]`` in x's dtype, or int8.
        rows: ``[1]`` int32 on x's device, at most M.
        bias: ``[N]`` or null.
        scale: ``[N]`` fp32 that an int8 weight's rows are multiplied with.

    Returns:
        ``[M, N]`` in x's dtype; rows from `rows` on are undefined.

    Raises:
        ValueError: an int8 weight without scale, or a scale without one.
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
