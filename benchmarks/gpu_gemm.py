"""The product part of `gpu_step`: a bucket's rows times a layer's four projections, in all ways of `kernels.products`.

The library multiplies the whole bucket; the others as many rows as there are in it on average, which they read from the
device. The fastest way of every (bucket, outputs, inputs) is what `FusedTransformer(products=...)` wants to know.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_bench import Bench, Row
from benchmarks.roofline import MODELS, Bar, projections, ratio
from lopa_dist.engine.buckets import STEPS, ladder
from lopa_dist.kernels.products import PRODUCTS, Product
from lopa_dist.models.config import ModelConfig

CACHES = 16  # weights of a run are at least so many times the L2 cache
VIRTUAL = tuple(name for name in PRODUCTS if name != "library")
SMALL = 2048  # buckets up to it come first: larger steps are prefills

Weights = dict[str, tuple[list[Tensor], "Tensor | None"]]


def rows() -> list[Row]:
    """The table's rows, buckets rising."""
    bar = Bar("x library", 1.0)
    return [
        Row("gemm", f"{name}, {size} rows", dict.fromkeys((*PRODUCTS, "x library", "TFLOP/s")), [bar])
        for name in MODELS
        for size in ladder()
    ]


def run(
    bench: Bench, table: list[Row], small: Callable[[ModelConfig], ModelConfig], products: list[dict[str, Any]]
) -> None:
    """Measure, and append to `products` what was found fastest; `small` makes a toy of a shape."""
    sizes = ladder()
    for bounds in ((0, SMALL), (SMALL, sizes[-1])):
        for number, (name, config) in enumerate(MODELS.items()):
            if bench.deadline.over():
                return
            shape = small(config) if bench.toy else config
            weights = make(bench, shape)
            for i, size in enumerate(sizes):
                if bounds[0] < size <= bounds[1] and not (bench.toy and size > 64):
                    row = table[number * len(sizes) + i]
                    bench.fill(row, partial(measure, bench, shape, weights, size, products, name))


def make(bench: Bench, config: ModelConfig) -> Weights:
    """Random weights: of so many layers that no cache holds them, where the model has as many."""
    weights: Weights = {}
    for name, (n, k) in projections(config).items():
        count = min(max(-(-CACHES * bench.cache // (2 * n * k)), 2), config.layers)
        parts = [torch.empty(n, k, dtype=torch.bfloat16, device=bench.device).normal_(0, 0.02) for _ in range(count)]
        biased = name == "qkv" and config.qkv_bias
        weights[name] = parts, torch.zeros(n, dtype=torch.bfloat16, device=bench.device) if biased else None
    return weights


def average(size: int) -> int:
    """Rows in a bucket, on average."""
    step = next(step for top, step in STEPS if size <= top)
    return size - step // 2


def every(product: Product, x: Tensor, weights: list[Tensor], real: Tensor, bias: Tensor | None) -> None:
    """The product with each of the weights; results are dropped, so one's memory serves the next."""
    for weight in weights:
        product(x, weight, real, bias)


def measure(
    bench: Bench, config: ModelConfig, weights: Weights, size: int, products: list[dict[str, Any]], name: str, row: Row
) -> None:
    """One bucket: microseconds of a layer's projections, each way."""
    real = torch.full((1,), average(size), dtype=torch.int32, device=bench.device)
    total: dict[str, float | None] = dict.fromkeys(PRODUCTS, 0.0)
    virtual: float | None = 0.0
    for parts, bias in weights.values():
        n, k = parts[0].shape
        x = torch.empty(size, k, dtype=torch.bfloat16, device=bench.device).normal_()
        times: dict[str, float] = {}
        for way, product in PRODUCTS.items():
            try:
                spent = bench.graph(partial(every, product, x, parts, real, bias), repeats=7)
            except RuntimeError as error:
                if bench.toy or way == "library":
                    raise
                spent, row.note = None, f"{way} failed: {str(error).strip().splitlines()[0]}"
            if spent is not None:
                times[way] = 1e3 * spent / len(parts)
            before = total[way]
            total[way] = None if before is None or way not in times else before + times[way]
        best = min((times[way] for way in VIRTUAL if way in times), default=None)
        virtual = None if virtual is None or best is None else virtual + best
        if times:
            fastest = min(times, key=lambda way: times[way])
            products.append({"model": name, "rows": size, "outputs": n, "inputs": k, "fastest": fastest, "us": times})
    operations = 2.0 * size * sum(n * k for n, k in projections(config).values())
    library = total["library"]
    row.figures |= total
    row.figures["x library"] = ratio(virtual, library)
    row.figures["TFLOP/s"] = None if library is None else operations / library / 1e6
