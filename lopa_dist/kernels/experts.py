"""Products of rows with the weights of the experts that each row chose, grouped by expert.

A row's bits depend on that row alone. An expert's group may have any number of rows, so every group is padded to whole
tiles of `ROW_TILE` rows, as all packed rows are: matrix kernels then give a row the same bits in any group. The outputs
of a row's experts are added one by one, in the order in which the row chose them.

On a GPU the host must not wait for the groups' sizes. With torch's grouped products it does not wait in fp8, or in
bf16 on Hopper and Blackwell (`by_library`). In all other cases torch fetches the sizes and loops over experts, so
`experts_triton` multiplies instead.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lopa_dist.kernels.dispatch import fused
from lopa_dist.kernels.quantized import FP8, fp8_linear, grouped_fp8_product, int8_linear, quantize_rows
from lopa_dist.kernels.routing import Groups
from lopa_dist.ragged import ROW_TILE

TALL = 64  # rows per tile where experts have many rows


def by_library(device: torch.device, dtype: torch.dtype, weight: torch.dtype) -> bool:
    """Return whether torch's grouped product on a GPU takes rows of `dtype` and such weights, without a host wait."""
    if weight == FP8:
        return True
    return dtype == weight == torch.bfloat16 and torch.cuda.get_device_capability(device)[0] in (9, 10)


def height_for(choices: int, x: Tensor, weight: Tensor) -> int:
    """Return the number of rows per tile if rows like `x` make `choices` choices among experts, ``weight [E, N, K]``.

    A tall tile reads its expert's weight once for more rows; a short one needs less padding.
    """
    many = x.is_cuda and choices > TALL // 2 * len(weight)
    return TALL if many and not by_library(x.device, x.dtype, weight.dtype) else ROW_TILE


def expert_linear(x: Tensor, weight: Tensor, groups: Groups, scale: Tensor | None = None) -> Tensor:
    """Return each group's rows times its expert's weight: ``x [P, K], weight [E, N, K]`` -> ``[P, N]``.

    On a GPU, torch's grouped product or `experts_triton` computes it (see above), and rows after the last group are
    undefined.

    Args:
        x: the grouped rows.
        weight: in x's dtype, or quantised by `kernels.quantized`, expert by expert.
        groups: the rows' groups.
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
    """Compute `expert_linear`, waiting for the groups' sizes only if `by_library` and Triton both lack the product."""
    if scale is not None and weight.dtype == FP8:
        rows = quantize_rows(x)
        return grouped_fp8_product(rows.eight, rows.scale, weight, scale, groups.ends).to(x.dtype)
    if fused(x, "experts") and not by_library(x.device, x.dtype, weight.dtype):
        from lopa_dist.kernels import experts_triton

        return experts_triton.expert_linear(x, weight, scale, groups.ends, groups.height)
    whole = weight if scale is None else (weight.to(x.dtype) * scale[..., None]).to(x.dtype)
    return F.grouped_mm(x, whole.transpose(1, 2), offs=groups.ends)


def weighted_sum(x: Tensor, groups: Groups, weights: Tensor) -> Tensor:
    """Return the outputs of rows' experts, ``x [P, d]``, weighted by ``weights [R, k]`` and summed: ``[R, d]``.

    Each row's sum is in fp32 and in the order of its choice.
    """
    if fused(x, "experts"):
        from lopa_dist.kernels import experts_triton

        return experts_triton.weighted_sum(x, groups.place, weights)
    total = torch.zeros(len(weights), x.shape[1], device=x.device)
    for place, weight in zip(groups.place.unbind(1), weights.float().unbind(1), strict=True):
        total += x.index_select(0, place).float() * weight[:, None]
    return total.to(x.dtype)
