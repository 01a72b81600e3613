"""How a job multiplies padded batches: as `lopa-dist profile` found it fastest on the device, where it was run.

That depends on the products' shapes and precision, and not on weights or on how is decoded: one profile serves all
models of a shape, whatever the other options.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from lopa_dist.config import ModelOptions
from lopa_dist.engine.products import ProductTimes, choices
from lopa_dist.jobs.loading import choose_dtype
from lopa_dist.jobs.measurements import Subject, keep, kept, machine
from lopa_dist.kernels.products import PRODUCTS, Choices
from lopa_dist.models.config import ModelConfig
from lopa_dist.models.fused import projections

KIND = "products"


def subject(options: ModelOptions, shape: ModelConfig, device: torch.device) -> Subject:
    """What times of products hold for."""
    return machine(device) | {
        "dtype": choose_dtype(options, device),
        "projections": projections(shape),
        "bias": shape.qkv_bias,
        "ways": list(PRODUCTS),
    }


def keep_times(options: ModelOptions, shape: ModelConfig, device: torch.device, times: list[ProductTimes]) -> Path:
    """Write them; returns the file."""
    return keep(KIND, subject(options, shape, device), {"times": [asdict(one) for one in times]})


def products_of(
    options: ModelOptions,
    shape: ModelConfig,
    device: torch.device,
    agree: Callable[[str, str], str] = lambda name, own: own,
) -> Choices:
    """The ways to multiply, by the profile; none but the library's where there is none.

    With a group's `agree` they are rank 0's, whatever the other ranks have in their cache.
    """
    found = kept(KIND, subject(options, shape, device)) or {"times": []}
    times = json.loads(agree("products", json.dumps(found["times"])))
    return choices(ProductTimes(**one) for one in times)
