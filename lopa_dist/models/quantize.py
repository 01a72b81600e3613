"""Quantised weights: the layers' projections in fp8 or int8, which replace the loaded ones.

Every output channel has its own scale, so that a tensor rank, which has some of the channels, quantises to the same
numbers as a rank that has them all. Experts' weights are quantised while they are loaded, since unquantised they may
not fit. The embedding, norms, routers and LM head stay as they are: the head decides between tokens, and it is 7 % of
Dream-7B.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from lopa_dist.kernels.dispatch import suits_c
from lopa_dist.kernels.product import Linear
from lopa_dist.kernels.quantized import (
    FP8,
    QuantizedRows,
    check_fp8,
    fp8_linear,
    int8_linear,
    quantize_fp8,
    quantize_int8,
)
from lopa_dist.models.experts import SparseMLP
from lopa_dist.models.mask_rows import MaskRowAdapter, adapter_of
from lopa_dist.models.transformer import Layer, Transformer

Quantizer = Callable[[Tensor], tuple[Tensor, Tensor]]
QUANTIZERS: dict[str, Quantizer] = {"fp8": quantize_fp8, "int8": quantize_int8}
STORED = {"fp8": FP8, "int8": torch.int8}


class QuantizedLinear(nn.Module):
    """A linear layer whose weight is stored as `kind`, with one fp32 scale per output channel."""

    weight: Tensor  # [N, K]
    scale: Tensor  # [N]
    bias: Tensor | None  # [N]
    adapter: MaskRowAdapter | None
    fast = False  # whether an fp8 product keeps fewer bits of partial sums; not measured yet

    def __init__(self, kind: str, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.kind, self.adapter = kind, None
        for name, value in (("weight", weight), ("scale", scale), ("bias", bias)):
            self.register_buffer(name, value)

    @classmethod
    def of(
        cls, kind: str, linear: nn.Linear, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> QuantizedLinear:
        """Return a linear layer in quantised form, with the same hooks, which tensor parallelism needs.

        Args:
            kind: how its weight is stored.
            linear: the layer; it moves, too.
            device: where it goes before it is quantised; None: where it is.
            dtype: in which it is quantised; None: that of its weight.
        """
        linear = linear.to(device=device, dtype=dtype)
        quantized = cls(kind, *QUANTIZERS[kind](linear.weight.data), None if linear.bias is None else linear.bias.data)
        quantized._forward_pre_hooks, quantized._forward_hooks = linear._forward_pre_hooks, linear._forward_hooks
        quantized.adapter = adapter_of(linear)
        return quantized

    @property
    def takes_fp8(self) -> bool:
        """Return whether its input may be `QuantizedRows`; adapters and hooks that gather inputs need a tensor."""
        return self.kind == "fp8" and self.adapter is None and not self._forward_pre_hooks

    def forward(self, x: Tensor | QuantizedRows, rows: Tensor | None = None) -> Tensor:
        """Return ``[R, N]`` for x ``[R, K]``; if `rows` ``[1]`` says how many are real, the others are undefined."""
        if self.kind == "int8":
            assert isinstance(x, Tensor)
            return int8_linear(x, self.weight, self.scale, self.bias, rows)
        return fp8_linear(x, self.weight, self.scale, self.bias, self.fast, rows)


def quantize(
    model: Transformer, kind: str, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> None:
    """Quantise the layers' projections in place, one at a time, so that memory never holds both forms of all.

    The other arguments are those of `QuantizedLinear.of`: a GPU gets one unquantised weight at a time.

    Raises:
        ValueError: a weight has NaN or infinity.
    """
    for block, name, linear in linears(model):
        setattr(block, name, QuantizedLinear.of(kind, linear, device, dtype))


def quantized_parameters(model: Transformer) -> set[str]:
    """Return the names of the parameters that `quantize` replaces."""
    projections = {id(linear) for _, _, linear in linears(model)}
    modules = [(name, module) for name, module in model.named_modules() if id(module) in projections]
    return {f"{name}.{own}" for name, module in modules for own, _ in module.named_parameters()}


def check(model: Transformer, kind: str, device: torch.device) -> None:
    """Raise a ValueError unless the device can multiply with a model's projections in this form."""
    if kind == "fp8" and device.type == "cuda":
        for _, _, linear in linears(model):
            check_fp8(device, linear.weight.shape)
        for mlp in mixtures(model):
            for weight in (mlp.gate_up[0, 0], mlp.down[0]):
                check_fp8(device, weight.shape, grouped=True)


def mixtures(model: Transformer) -> Iterator[SparseMLP]:
    """Return the layers' mixtures of experts."""
    return (module for module in model.modules() if isinstance(module, SparseMLP))


def allocate_experts(model: Transformer, kind: str) -> None:
    """Give a model that is not loaded yet empty tensors for its experts' quantised weights."""
    for mlp in mixtures(model):
        mlp.allocate(kind, STORED[kind])


def stored_parts(parameter: str, weight: Tensor, kind: str) -> list[tuple[str, Tensor]]:
    """Return what is stored of an expert's weight, by the names of the parameters that it belongs to."""
    if kind == "none":
        return [(parameter, weight)]
    quantized, scale = QUANTIZERS[kind](weight)
    return [(parameter, quantized), (f"{parameter}_scale", scale)]


def linears(model: Transformer) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Yield the layers' unquantised projections: for each the module that it is in, its name there, and itself."""
    for layer in model.model.layers:
        assert isinstance(layer, Layer)
        blocks = [layer.self_attn, layer.mlp, getattr(layer.mlp, "shared_experts", None)]
        for block in filter(None, blocks):
            for name, linear in list(block.named_children()):
                if isinstance(linear, nn.Linear):
                    yield block, name, linear


def for_few_rows(weight: Tensor) -> Tensor:
    """Return a weight ``[N, K]`` in the memory order in which its products with few rows are fastest.

    On a CPU that is by column: C multiplies it as stored, and torch's products of 16 to 48 rows in fp32 take 0.75 to
    0.95 of the time, with the same bits. In bf16 torch's would take up to 1.6 times as long.
    """
    by_columns = weight.device.type == "cpu" and (weight.dtype == torch.float32 or suits_c(weight))
    return weight.t().contiguous().t() if by_columns else weight


def laid_out(linear: nn.Module) -> nn.Module:
    """Store a projection's weight as `for_few_rows` does, in place, and return the projection."""
    if isinstance(linear, nn.Linear):
        linear.weight.data = for_few_rows(linear.weight.data)
    return linear


def joined(parts: list[nn.Module]) -> nn.Module:
    """Return one projection that computes several of the same input side by side, with their weights stacked.

    The parts' tensors become views of its tensors, so nothing is in memory twice.
    """
    weights: list[Tensor] = [part.weight for part in parts]  # type: ignore[misc]
    if weights[0].element_size() == 1:  # as bytes: not every torch can concatenate fp8 on a GPU
        weight = torch.cat([part.view(torch.uint8) for part in weights]).view(weights[0].dtype)
    else:
        weight = for_few_rows(torch.cat(weights))
    biases = [part.bias for part in parts]
    bias = None if biases[0] is None else torch.cat(biases)  # type: ignore[arg-type]
    first = parts[0]
    if isinstance(first, QuantizedLinear):
        joint: nn.Module = QuantizedLinear(first.kind, weight, torch.cat([p.scale for p in parts]), bias)  # type: ignore[misc]
    else:
        joint = Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
        joint.weight = nn.Parameter(weight, requires_grad=False)
        joint.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
    sizes = [len(part) for part in weights]
    for name in ("weight", "scale", "bias"):
        if (tensor := getattr(joint, name, None)) is not None:
            for part, view in zip(parts, tensor.data.split(sizes), strict=True):
                getattr(part, name).data = view
    return joint
