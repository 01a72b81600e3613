"""From the model options to a model on its device."""

from __future__ import annotations

import logging
import os

import torch

from lopa_dist.config import Config, ModelOptions
from lopa_dist.models.adapter import Adapter, load_adapter
from lopa_dist.models.checkpoint import DTYPES, load_model
from lopa_dist.models.files import find
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Communicator
from lopa_dist.parallel.launcher import World

log = logging.getLogger("lopa_dist")


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


def find_adapter(options: ModelOptions, warn: bool) -> Adapter | None:
    """The LoRA adapter of `model.lora`; `warn` if it was made for another model."""
    if options.lora is None:
        return None
    adapter = load_adapter(find(options.lora, "model.lora"))
    message = adapter.mismatch(options.path)
    if warn and message:
        log.warning("WARNING: %s", message)
    return adapter


def load(options: ModelOptions, device: torch.device, warn: bool, tensor: Communicator | None = None) -> Transformer:
    """The model, adapted, split and quantised as the options say.

    `warn` of an adapter for another model, and of fp8 where it is emulated.
    """
    if warn and options.quantization == "fp8" and device.type != "cuda":
        log.warning(
            "WARNING: model.quantization=fp8 is emulated on a CPU, slower than model.quantization=none: "
            "it shows what fp8 does to the texts, and nothing of its speed"
        )
    dtype = DTYPES[choose_dtype(options, device)]
    return load_model(find(options.path), dtype, device, find_adapter(options, warn), tensor, options.quantization)
