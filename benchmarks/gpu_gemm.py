"""The product part of `gpu_step`: a bucket's rows times a layer's four projections, in all ways of `kernels.products`.

The library multiplies the whole bucket; the others as many rows as there are in it on average, which they read from the
device. The fastest way of every (bucket, outputs, inputs) is what `lopa-dist profile` finds out for one model.
"""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.gpu_bench import Bench, Row, brief
from benchmarks.roofline import MODELS, Bar, ratio
from lopa_dist.engine.buckets import ladder
from lopa_dist.engine.products import REPEATS, ProductTimes, Weights, enough, time_ways
from lopa_dist.kernels.products import PRODUCTS
from lopa_dist.models.config import ModelConfig
from lopa_dist.models.fused import projections

VIRTUAL = tuple(name for name in PRODUCTS if name != "library")
TOY = 64  # rows, the most of toys
SMALL = 2048  # larger steps are prefills

Found = dict[str, list[ProductTimes]]
"""What was measured, by model."""


def rows() -> list[Row]:
    """The table's rows, buckets rising."""
    bar = Bar("x library", 1.0)
    return [
        Row("gemm", f"{name}, {size} rows", dict.fromkeys((*PRODUCTS, "x library", "TFLOP/s")), [bar])
        for name in MODELS
        for size in ladder()
    ]


@torch.inference_mode()
def run(bench: Bench, table: list[Row], found: Found, above: int, most: int) -> None:
    """Measure the buckets of more than `above` and at most `most` rows; what was found is appended to `found`."""
    sizes = ladder()
    for number, (name, config) in enumerate(MODELS.items()):
        if bench.deadline.over():
            return
        shape = bench.shape(config)
        weights = make(bench, shape)
        for i, size in enumerate(sizes):
            if above < size <= most and not (bench.toy and size > TOY):
                row = table[number * len(sizes) + i]
                bench.fill(row, partial(measure, bench, shape, weights, size, found[name]))


def make(bench: Bench, config: ModelConfig) -> dict[str, Weights]:
    """Random weights: of so many layers that no cache holds them, where the model has as many."""
    weights: dict[str, Weights] = {}
    for name, (n, k) in projections(config).items():
        count = min(enough(2 * n * k, bench.cache), config.layers)
        bias = torch.zeros(n, dtype=torch.bfloat16, device=bench.device) if name == "qkv" and config.qkv_bias else None
        layers = [torch.empty(n, k, dtype=torch.bfloat16, device=bench.device) for _ in range(count)]
        weights[name] = [(weight.normal_(0, 0.02), bias) for weight in layers]
    return weights


def measure(
    bench: Bench,
    config: ModelConfig,
    weights: dict[str, Weights],
    size: int,
    found: list[ProductTimes],
    row: Row,
) -> None:
    """One bucket: microseconds of a layer's projections, each way."""
    total: dict[str, float | None] = dict.fromkeys(PRODUCTS, 0.0)
    virtual: float | None = 0.0
    for parts in weights.values():
        times, failed = time_ways(size, parts, partial(bench.graph, repeats=REPEATS))
        for way, error in failed.items():
            if bench.toy:
                raise error
            row.note = f"{way} failed: {brief(error)}"
        for way in PRODUCTS:
            before = total[way]
            total[way] = None if before is None or way not in times else before + times[way]
        best = min((times[way] for way in VIRTUAL if way in times), default=None)
        virtual = None if virtual is None or best is None else virtual + best
        if times:
            outputs, inputs = parts[0][0].shape
            found.append(ProductTimes(size, outputs, inputs, times))
    operations = 2.0 * size * sum(n * k for n, k in projections(config).values())
    library = total["library"]
    row.figures |= total
    row.figures["x library"] = ratio(virtual, library)
    row.figures["TFLOP/s"] = None if library is None else operations / library / 1e6
