"""Which kernels an engine runs in torch's form: by `engine.kernels`, and by how Triton's kernels did on this GPU."""

from __future__ import annotations

import torch

from lopa_dist.engine.config import EngineConfig
from lopa_dist.kernels.dispatch import KERNELS
from lopa_dist.kernels.experts import by_library
from lopa_dist.kernels.preflight import WITHOUT_GRAPHS, Widths, faults, refused
from lopa_dist.kernels.quantized import FP8
from lopa_dist.models.config import ModelConfig
from lopa_dist.models.experts import router_of
from lopa_dist.models.quantize import QuantizedLinear, mixtures
from lopa_dist.models.transformer import Transformer


def plain_kernels(
    model: Transformer,
    options: EngineConfig,
    device: torch.device,
    tile_rows: int | None,
    ranks: int = 1,
    bounded: bool = False,
) -> frozenset[str]:
    """Return the kernels that run in torch's form on a GPU; on a CPU all do, whatever is returned.

    Ranks that share a model must use the same form, because the parts of the record head's sums that they exchange
    differ between the two forms. With such ranks, therefore, a kernel that fails ends the job.

    Args:
        model: on the device.
        options: `kernels`, `attention` and `reproducible` are read.
        device: where the kernels run.
        tile_rows: rows of a tile of meta-attention; None: another kernel attends.
        ranks: how many the model is split over.
        bounded: as in `Widths`.

    Raises:
        ValueError: a kernel cannot be used, and the options or the ranks allow no other.
    """
    if options.kernels == "torch":
        if device.type == "cuda" and options.attention == "meta":
            raise ValueError("engine.kernels=torch: engine.attention=meta is a Triton kernel; leave it at auto")
        return frozenset(KERNELS)
    if device.type != "cuda":
        if options.kernels == "triton":
            raise ValueError(
                f"engine.kernels=triton: Triton kernels need a GPU, and the model is on a {device.type}; leave it at "
                "auto"
            )
        return frozenset()
    wanted, dtype = needed(model, options, tile_rows), model.head_weight.dtype
    weights = sorted({mlp.down.dtype for mlp in mixtures(model)}, key=str)
    experts = tuple(weight for weight in weights if not by_library(device, dtype, weight))
    widths = widths_of(model.config, tile_rows, ranks, bounded, not options.reproducible, experts)
    if options.kernels == "auto" and ranks == 1:
        return refused(widths, dtype, device, wanted)
    why = "engine.kernels=triton" if options.kernels == "triton" else "ranks that share a model need the same kernels"
    for name, fault in faults(widths, dtype, device, wanted).items():
        raise ValueError(f"{why}: {name}: {fault}; engine.kernels=torch runs without Triton, more slowly")
    return frozenset()


def needed(model: Transformer, options: EngineConfig, tile_rows: int | None) -> tuple[str, ...]:
    """Return which kernels the model's forwards launch on a GPU with these options."""
    kinds = {module.kind for module in model.modules() if isinstance(module, QuantizedLinear)}
    optional = {
        "attention": tile_rows is not None,
        "vgemm": options.reproducible or "int8" in kinds,
        "experts": model.config.experts is not None,
        "fp8": "fp8" in kinds,
    }
    return tuple(name for name in KERNELS if optional.get(name, True))


def without_graphs(model: Transformer, plain: frozenset[str], device: torch.device) -> bool:
    """Return whether the torch form of a kernel in `plain` makes the host wait for the device: no graph can do that."""
    dtype = model.head_weight.dtype
    wholes = {FP8 if mlp.kind == "fp8" else dtype for mlp in mixtures(model)}  # int8 is widened before it is multiplied
    asks = device.type == "cuda" and any(not by_library(device, dtype, whole) for whole in wholes)
    return bool(plain & WITHOUT_GRAPHS) or ("experts" in plain and asks)


def widths_of(
    shape: ModelConfig,
    tile_rows: int | None,
    ranks: int = 1,
    bounded: bool = False,
    whole: bool = True,
    experts: tuple[torch.dtype, ...] = (),
) -> Widths:
    """Return what the kernels of a model of this shape are compiled for on one of the ranks that share it.

    Args:
        shape: of the whole model.
        tile_rows, ranks: as in `plain_kernels`.
        bounded, whole, experts: as in `Widths`.
    """
    router, routed = (None, 0) if shape.experts is None else (router_of(shape.experts), shape.experts.count)
    return Widths(
        shape.hidden_size, shape.intermediate_size // ranks, shape.heads // ranks, shape.kv_heads // ranks,
        shape.head_dim, tile_rows or 1, bounded, whole, shape.qk_norm, shape.rope_fp32, experts,
        router, routed,
    )  # fmt: skip
