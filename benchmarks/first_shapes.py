"""The shapes at which `gpu_first` checks: those of the models on a GPU, toys of them on a CPU or to be quick."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.roofline import DREAM, LLADA
from lopa_dist.models.config import ModelConfig

CPU = torch.device("cpu")


def toy(shape: ModelConfig) -> ModelConfig:
    """Return a small model with as many query heads a K/V head."""
    kv_heads = max(1, 7 * shape.kv_heads // shape.heads)
    return replace(
        shape, vocab_size=512, hidden_size=64, layers=2, heads=7, kv_heads=kv_heads, head_dim=16, intermediate_size=96,
        mask_id=511, eos_ids=(510,), pad_id=510,
    )  # fmt: skip


def models(device: torch.device) -> dict[str, ModelConfig]:
    """Return the shapes of the models, by name; toys of them on a CPU."""
    both = {"Dream-7B": DREAM, "LLaDA-8B": LLADA}
    return both if device.type == "cuda" else {name: toy(shape) for name, shape in both.items()}


def dtype_of(device: torch.device) -> torch.dtype:
    """Return the precision that is checked."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def noise(device: torch.device, *shape: int) -> Tensor:
    """Return normal numbers in the precision that is checked."""
    return torch.randn(shape, device=device, dtype=dtype_of(device))


def has_fp8(device: torch.device) -> bool:
    """Whether a device multiplies in fp8; a CPU computes what a GPU would."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9)
