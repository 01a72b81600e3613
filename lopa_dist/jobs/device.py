"""The device of a rank, its threads, and the precision of the weights there."""

from __future__ import annotations

import os

import torch

from lopa_dist.config import Config, ModelOptions
from lopa_dist.parallel.launcher import World


def choose_device(config: Config, world: World) -> torch.device:
    """The GPU of this rank, or the CPU with its share of the threads."""
    name = config.model.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda"):
        if not torch.cuda.is_available():
            raise ValueError(f"model.device={name}: this torch sees no GPU; use cpu")
        own = world.local_rank % torch.cuda.device_count()
        device = torch.device(name if ":" in name else f"cuda:{own}")
        torch.cuda.set_device(device)
        return device
    torch.set_num_threads(threads(config, world))
    return torch.device(name)


def threads(config: Config, world: World) -> int:
    """How many this rank may keep busy: what the user says, or its share of the cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return config.parallel.threads or max(1, cores // world.local_size)


def choose_dtype(options: ModelOptions, device: torch.device) -> str:
    """The name of the weights' precision: `model.dtype`, or what suits the device."""
    if options.dtype != "auto":
        return options.dtype
    return "bf16" if device.type == "cuda" else "fp32"
