"""Linear layers with eight-bit weights: fp8 weights with fp8 activations, or int8 weights only.

fp8 (W8A8) halves both the weight's bytes and the time of the multiplication; every row of the activations is quantised
before it. int8 (weight-only) halves the bytes and keeps the activations. Weights and activations alike have one scale
per row, so rows stay independent: a row's numbers do not depend on its batch, and a pad row's NaN stays in that row.

On a CPU the fp8 layer computes what a GPU would, up to the order of sums: it shows what fp8 does to accuracy, but is
slower than the unquantised weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lopa_dist.kernels.dispatch import fused, hopper
from lopa_dist.kernels.virtual_gemm import vgemm
from lopa_dist.staging import every_row

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # the greatest number of FP8
INT8_MAX = 127.0
FEW = 64  # the most rows of which our fp8 product is faster than the library's
SMALLEST = 2.0**-100  # taken as a row's greatest number where that is smaller, so that scales stay normal fp32 numbers


def quantize_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return fp8 (e4m3fn) numbers ``[N, K]`` and fp32 scales ``[N]``, whose product is about ``weight [N, K]``.

    Raises:
        ValueError: the weight has NaN or infinity.
    """
    check_finite(weight, "quantize_fp8")
    return quantize_rows_plain(weight)


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 numbers ``[N, K]`` (-127 to 127) and fp32 scales ``[N]``, whose product is about ``weight [N, K]``.

    Raises:
        ValueError: the weight has NaN or infinity.
    """
    check_finite(weight, "quantize_int8")
    greatest = weight.float().abs().amax(1).clamp(min=SMALLEST)
    scale = greatest / INT8_MAX
    return (weight.float() / scale[:, None]).round().to(torch.int8), scale


@dataclass
class QuantizedRows:
    """Activations in fp8, for products with fp8 weights."""

    eight: Tensor  # [M, K] fp8
    scale: Tensor  # [M] fp32; NaN for a row with NaN or infinity
    dtype: torch.dtype  # of the activations before they were quantised

    @property
    def device(self) -> torch.device:
        """Return the tensors' device."""
        return self.eight.device

    def __len__(self) -> int:
        return len(self.eight)

    def __getitem__(self, rows: slice) -> QuantizedRows:
        return QuantizedRows(self.eight[rows], self.scale[rows], self.dtype)


def quantize_rows(x: Tensor) -> QuantizedRows:
    """Return activations ``[M, K]`` quantised to fp8."""
    if fused(x, "fp8"):
        from lopa_dist.kernels import rows_triton

        return QuantizedRows(*rows_triton.quantize_rows(x), x.dtype)
    return QuantizedRows(*quantize_rows_plain(x), x.dtype)


def quantize_rows_plain(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return fp8 numbers and scales: the reference implementation of `quantize_rows`."""
    greatest = x.float().abs().amax(1).clamp(min=SMALLEST)
    scale = (greatest / FP8_MAX).where(greatest.isfinite(), torch.nan)
    return (x.float() * (greatest.reciprocal() * FP8_MAX)[:, None]).to(FP8), scale


def fp8_linear(
    x: Tensor | QuantizedRows,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    fast: bool = False,
    count: Tensor | None = None,
) -> Tensor:
    """Return ``x @ weight.T + bias`` in fp8, summed in fp32.

    Args:
        x: ``[M, K]``; quantised here, row by row, unless it is already.
        weight: ``[N, K]`` of `quantize_fp8`. On CUDA, N and K are multiples of 16, see `check_fp8`.
        scale: ``[N]`` of `quantize_fp8`.
        bias: ``[N]`` or None.
        fast: whether a GPU's product of more than `FEW` rows may keep fewer bits of partial sums.
        count: ``[1]`` int32 on x's device, how many rows are real; None: all.

    Returns:
        ``[M, N]`` in x's dtype; rows from `count` on are undefined.

    Raises:
        ValueError: the GPU has no fp8, or its product does not take these sizes.
    """
    if x.device.type == "cuda":
        check_fp8(x.device, weight.shape)
    rows = quantize_rows(x) if isinstance(x, Tensor) else x
    if len(rows) <= FEW and fused(rows.eight, "fp8") and hopper(rows.device):
        from lopa_dist.kernels import virtual_gemm_triton

        real = every_row(rows.eight) if count is None else count
        found = virtual_gemm_triton.vgemm(rows.eight, weight, real, bias, scale, row_scale=rows.scale)
        return found.to(rows.dtype)
    if rows.device.type == "cuda":
        return fp8_product(rows.eight, rows.scale, weight, scale, bias, fast).to(rows.dtype)
    product = F.linear(rows.eight.float(), weight.float()) * rows.scale[:, None] * scale
    return (product if bias is None else product + bias.float()).to(rows.dtype)


def fp8_product(
    rows: Tensor, row_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, fast: bool = False
) -> Tensor:
    """Return torch's product of fp8 ``[M, K]`` and ``[N, K]``, with scales ``[M]`` and ``[N]``, as bf16 ``[M, N]``."""
    return torch._scaled_mm(
        rows,
        weight.t(),
        row_scale[:, None],
        scale[None],
        bias=None if bias is None else bias.bfloat16(),
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )


def grouped_fp8_product(rows: Tensor, row_scale: Tensor, weight: Tensor, scale: Tensor, ends: Tensor) -> Tensor:
    """Return torch's product of fp8 rows ``[P, K]``, in groups that end at `ends`, with ``weight [E, N, K]``: bf16."""
    return torch._scaled_grouped_mm(
        rows, weight.transpose(1, 2), row_scale, scale, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=False
    )


def int8_linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, rows: Tensor | None = None
) -> Tensor:
    """Return ``x @ (weight * scale).T + bias`` as `vgemm` computes it, with `weight` and `scale` of `quantize_int8`.

    `rows` ``[1]`` says how many rows are real; None: all.
    """
    return vgemm(x, weight, every_row(x) if rows is None else rows, bias, scale)


def check_finite(weight: Tensor, where: str) -> None:
    """Raise a ValueError that names the first row with NaN or infinity."""
    bad = (~weight.isfinite()).any(1).nonzero()
    if len(bad):
        raise ValueError(
            f"{where}: row {int(bad[0])} of a weight of shape {list(weight.shape)} holds NaN or infinity "
            f"({len(bad)} rows do); check the checkpoint, or load it in bf16 or fp32: fp16 overflows at 65504"
        )


def check_fp8(device: torch.device, shape: Sequence[int], grouped: bool = False) -> None:
    """Raise a ValueError if the GPU, or the weight's `shape`, does not allow an fp8 product, or a `grouped` one."""
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    if grouped and capability[0] != 9:
        raise ValueError(
            f"fp8 on {name}: the library's product with experts needs compute capability 9.0 (Hopper), this GPU has "
            f"{capability[0]}.{capability[1]}; use int8 weights or bf16"
        )
    if capability < (8, 9):
        raise ValueError(
            f"fp8 on {name}: its products need compute capability 8.9 (Ada) or 9.0 (Hopper), this GPU has "
            f"{capability[0]}.{capability[1]}; use int8 weights or bf16"
        )
    if shape[0] % 16 or shape[1] % 16:
        raise ValueError(
            f"fp8: a weight of shape {list(shape)} is not in multiples of 16, as products on a GPU need; "
            "use int8 weights or bf16"
        )
