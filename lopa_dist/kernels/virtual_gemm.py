"""Linear layers whose number of real rows only the device knows: virtual padding (XY-Serve, section 4).

A CUDA graph freezes shapes, so the rows of a step are padded to a bucket's. These forms read how many are real from the
device and multiply only those; pad rows may hold anything, NaN included, and take no part.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lopa_dist.kernels.dispatch import fused

GROUPED = (9, 10)  # major compute capabilities whose rows torch counts on the device: Hopper and Blackwell's servers


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
    if fused(x):
        from lopa_dist.kernels import virtual_gemm_triton

        return virtual_gemm_triton.vgemm(x, weight, rows, bias, scale)
    return vgemm_plain(x, weight, rows, bias, scale)


def vgemm_plain(x: Tensor, weight: Tensor, rows: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
    """The oracle of `vgemm`."""
    out = x.new_full((len(x), len(weight)), torch.nan)
    real = x[: int(rows)]
    if scale is None:
        out[: len(real)] = F.linear(real, weight, bias)
        return out
    product = F.linear(real.float(), weight.float()) * scale
    out[: len(real)] = (product if bias is None else product + bias.float()).to(x.dtype)
    return out


def grouped_linear(x: Tensor, weight: Tensor, rows: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `vgemm`, by torch's grouped product with one group, which ends where the real rows end.

    Args:
        x: ``[M, K]``, bf16, with rows of a multiple of 16 bytes.
        weight: ``[N, K]`` likewise.
        rows: ``[1]`` int32 on x's device, at most M.
        bias: ``[N]`` or null; added behind the product, for grouped products take none.

    Returns:
        ``[M, N]``; rows from `rows` on are undefined.

    Raises:
        RuntimeError: a GPU whose major compute capability is not in `GROUPED`: there torch falls back to a loop that
            asks the device for `rows`, so no graph can be captured.
    """
    if x.is_cuda and torch.cuda.get_device_capability(x.device)[0] not in GROUPED:
        raise RuntimeError(
            f"grouped_linear on {torch.cuda.get_device_name(x.device)}: grouped products wait for the host but on "
            "compute capabilities 9 and 10; use vgemm or padded rows"
        )
    out = F.grouped_mm(x, weight.t()[None], offs=rows)
    return out if bias is None else out + bias
