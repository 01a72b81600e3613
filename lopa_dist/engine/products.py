"""Which way multiplies a bucket's rows with a weight fastest, by measuring it (virtual padding; XY-Serve, section 4).

The library multiplies the whole bucket, the other ways of `kernels.products` as many rows as there are in it on
average, which they read from the device. A run goes over the model's own layers, so the weights come from memory, as
they do in a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lopa_dist.engine.buckets import average, ladder
from lopa_dist.engine.clock import compiles, graphed, median_ms
from lopa_dist.kernels.dispatch import on_device
from lopa_dist.kernels.products import PRODUCTS, Choices, Product
from lopa_dist.models.fused import FusedTransformer

REPEATS = 7
CACHES = 16  # weights of a run are at least so many times the L2 cache, where the model has as many
UNKNOWN_CACHE = 64 << 20  # bytes, where torch does not say

Weights = Sequence[tuple[Tensor, "Tensor | None"]]
"""Weights ``[N, K]`` of one shape, each with its bias ``[N]`` or null."""
Clock = Callable[[Callable[[], object]], "float | None"]
"""Milliseconds of a function; null where it is only run."""


@dataclass(frozen=True)
class ProductTimes:
    """Microseconds of a product by way, of those that the device can run."""

    rows: int  # the bucket's
    outputs: int
    inputs: int
    us: dict[str, float]

    @property
    def fastest(self) -> str:
        """The way that took least."""
        return min(self.us, key=lambda way: self.us[way])


def choices(times: Iterable[ProductTimes]) -> Choices:
    """What `FusedTransformer` goes by."""
    return {(one.rows, one.outputs, one.inputs): one.fastest for one in times if one.fastest != "library"}


@torch.inference_mode()
def measure_products(network: FusedTransformer, most_rows: int, budget_s: float) -> list[ProductTimes]:
    """Time every product of the ladder's buckets up to `most_rows`, small ones first, until `budget_s` are spent.

    Where kernels are compiled, every product has run once before the budget begins. A bucket that was begun is
    finished. A quantised model has nothing to choose.
    """
    device = network.embedding.device
    weights = {shape: few(linears, device) for shape, linears in network.linears().items()}
    for size in ladder(most_rows) if compiles(device) else []:
        with on_device(device):
            for some in weights.values():
                time_ways(size, some[:1], only_run)
    deadline = time.perf_counter() + budget_s
    found: list[ProductTimes] = []
    for size in ladder(most_rows) if weights else []:
        for shape, some in weights.items():
            with on_device(device):
                us, _ = time_ways(size, some, lambda run: median_ms(graphed(run, device), device, REPEATS))
            found.append(ProductTimes(size, *shape, us))
        if device.type == "cuda":
            torch.cuda.empty_cache()  # of every graph's memory pool
        if time.perf_counter() > deadline:
            break
    return found


def time_ways(size: int, weights: Weights, clock: Clock) -> tuple[dict[str, float], dict[str, Exception]]:
    """Microseconds of a product of a bucket's rows by way, and what the ways raised that are not among them.

    Raises:
        Exception: what the library's product raised.
    """
    weight, _ = weights[0]
    x = torch.empty(size, weight.shape[1], dtype=weight.dtype, device=weight.device).normal_()
    rows = torch.full((1,), average(size), dtype=torch.int32, device=weight.device)
    us: dict[str, float] = {}
    failed: dict[str, Exception] = {}
    for way, product in PRODUCTS.items():
        try:
            spent = clock(partial(every, product, x, weights, rows))
        except Exception as error:  # torch's and Triton's have nothing in common
            if way == "library":
                raise
            failed[way] = error
            continue
        if spent is not None:
            us[way] = 1e3 * spent / len(weights)
    return us, failed


def only_run(run: Callable[[], object]) -> None:
    """The clock for what is compiled now, and timed later."""
    run()


def every(product: Product, x: Tensor, weights: Weights, rows: Tensor) -> None:
    """The product with each of the weights; results are dropped, so one's memory serves the next."""
    for weight, bias in weights:
        product(x, weight, rows, bias)


def few(linears: Sequence[torch.nn.Linear], device: torch.device) -> Weights:
    """As many of the linears' weights as no cache holds."""
    count = enough(linears[0].weight.nbytes, cache_bytes(device))
    return [(linear.weight, linear.bias) for linear in linears[:count]]


def enough(size: int, cache: int) -> int:
    """Weights of so many bytes that no cache of so many bytes holds."""
    return max(-(-CACHES * cache // size), 2)


def cache_bytes(device: torch.device) -> int:
    """A GPU's L2 cache; 0 on a CPU, where times count for nothing."""
    if device.type != "cuda":
        return 0
    return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or UNKNOWN_CACHE
