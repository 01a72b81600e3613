"""Products of rows with the weights of the experts that each row chose, grouped by expert.

A row's bits depend on itself alone. Its expert gets it among others, in groups of any number of rows, so every group is
filled up to whole tiles of `ROW_TILE` rows, as all packed rows are: then matrix kernels give a row the same bits in any
group. And what a row's experts give is added up one after the other, in the order of the row's own choice.

On a GPU the host must not wait for the groups' sizes. torch's grouped product does without on Hopper and Blackwell, in
bf16 alone (`by_library`); elsewhere it asks for them and loops over experts, so there `experts_triton` multiplies.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lopa_dist.kernels.dispatch import fused
from lopa_dist.kernels.quantized import FP8, fp8_linear, grouped_fp8_product, int8_linear, quantize_rows
from lopa_dist.kernels.routing import Groups
from lopa_dist.ragged import ROW_TILE

TALL = 64  # rows of a tile where experts have many


def by_library(device: torch.device, dtype: torch.dtype, weight: torch.dtype) -> bool:
    """Return whether torch's grouped product takes rows of `dtype` and such weights on a GPU, without a wait."""
    if weight == FP8:
        return True
    return dtype == weight == torch.bfloat16 and torch.cuda.get_device_capability(device)[0] in (9, 10)


def height_for(choices: int, x: Tensor, weight: Tensor) -> int:
    """Return how many rows a tile has where rows like x make `choices` among the experts of ``weight [E, N, K]``.

    A tall tile reads its expert's weight once for more rows; a short one leaves less room empty.
    """
    many = x.is_cuda and choices > TALL // 2 * len(weight)
    return TALL if many and not by_library(x.device, x.dtype, weight.dtype) else ROW_TILE


def expert_linear(x: Tensor, weight: Tensor, groups: Groups, scale: Tensor | None = None) -> Tensor:
    """Each group's rows times its expert's weight: ``x [P, K], weight [E, N, K]`` -> ``[P, N]``.

    On a GPU this is torch's grouped product or `experts_triton`'s, as above. Rows behind the last group are undefined
    there.

    Args:
        x: grouped rows.
        weight: in x's dtype, or quantised by `kernels.quantized`, expert by expert.
        groups: of the rows.
        scale: ``[E, N]`` of a quantised weight.
    """
    if x.is_cuda:
        return on_gpu(x, weight, groups, scale)
    out = x.new_empty(len(x), weight.shape[1])
    begin = 0
    for number, end in enumerate(groups.ends.tolist()):
        if end > begin:
            rows, own = x[begin:end], weight[number]
            if scale is None:
                torch.mm(rows, own.T, out=out[begin:end])
            else:
                linear = int8_linear if weight.dtype == torch.int8 else fp8_linear
                out[begin:end] = linear(rows, own, scale[number])
        begin = end
    return out


def on_gpu(x: Tensor, weight: Tensor, groups: Groups, scale: Tensor | None) -> Tensor:
    """As `expert_linear`; without a wait for the groups' sizes, unless `by_library` and Triton both have no product."""
    if scale is not None and weight.dtype == FP8:
        rows = quantize_rows(x)
        return grouped_fp8_product(rows.eight, rows.scale, weight, scale, groups.ends).to(x.dtype)
    if fused(x, "experts") and not by_library(x.device, x.dtype, weight.dtype):
        from lopa_dist.kernels import experts_triton

        return experts_triton.expert_linear(x, weight, scale, groups.ends, groups.height)
    whole = weight if scale is None else (weight.to(x.dtype) * scale[..., None]).to(x.dtype)
    return F.grouped_mm(x, whole.transpose(1, 2), offs=groups.ends)


def weighted_sum(x: Tensor, groups: Groups, weights: Tensor) -> Tensor:
    """What rows' experts gave ``[P, d]``, times ``weights [R, k]``, in fp32 and in the order of choice: ``[R, d]``."""
    if fused(x, "experts"):
        from lopa_dist.kernels import experts_triton

        return experts_triton.weighted_sum(x, groups.place, weights)
    total = torch.zeros(len(weights), x.shape[1], device=x.device)
    for place, weight in zip(groups.place.unbind(1), weights.float().unbind(1), strict=True):
        total += x.index_select(0, place).float() * weight[:, None]
    return total.to(x.dtype)
