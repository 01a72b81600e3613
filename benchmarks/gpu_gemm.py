"""The product part of `gpu_step`: a bucket's rows times a layer's four projections, by the library and by `vgemm`.

The library multiplies the whole bucket; `vgemm` as many rows as there are in it on average, which it reads from the
device. The engine takes the library's, and `vgemm` for `engine.reproducible` and int8 weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_bench import Bench, Row, brief
from benchmarks.roofline import MODELS, Bar, projections, ratio
from lopa_dist.engine.buckets import STEPS, ladder
from lopa_dist.kernels.virtual_gemm import vgemm
from lopa_dist.models.config import ModelConfig

TOY = 64  # rows, the most of toys
REPEATS = 7
CACHES = 16  # weights of a run are at least so many times the L2 cache, where the model has as many

Weights = Sequence[tuple[Tensor, "Tensor | None"]]
"""Weights ``[N, K]`` of one shape, each with its bias ``[N]`` or null."""


def library(x: Tensor, weight: Tensor, rows: Tensor, bias: Tensor | None) -> Tensor:
    """The library's product of all rows, padding included."""
    return F.linear(x, weight, bias)


PRODUCTS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]] = {"library": library, "vgemm": vgemm}


def rows() -> list[Row]:
    """The table's rows, buckets rising."""
    bar = Bar("x library", 1.0)
    return [
        Row("gemm", f"{name}, {size} rows", dict.fromkeys((*PRODUCTS, "x library", "TFLOP/s")), [bar])
        for name in MODELS
        for size in ladder()
    ]


@torch.inference_mode()
def run(bench: Bench, table: list[Row]) -> None:
    """Measure every bucket."""
    sizes = ladder()
    for number, config in enumerate(MODELS.values()):
        if bench.deadline.over():
            return
        shape = bench.shape(config)
        weights = make(bench, shape)
        for i, size in enumerate(sizes):
            if not (bench.toy and size > TOY):
                row = table[number * len(sizes) + i]
                bench.fill(row, partial(measure, bench, shape, weights, size))


def make(bench: Bench, config: ModelConfig) -> dict[str, Weights]:
    """Random weights: of so many layers that no cache holds them, where the model has as many."""
    weights: dict[str, Weights] = {}
    for name, (n, k) in projections(config).items():
        count = min(max(-(-CACHES * bench.cache // (2 * n * k)), 2), config.layers)
        bias = torch.zeros(n, dtype=torch.bfloat16, device=bench.device) if name == "qkv" and config.qkv_bias else None
        layers = [torch.empty(n, k, dtype=torch.bfloat16, device=bench.device) for _ in range(count)]
        weights[name] = [(weight.normal_(0, 0.02), bias) for weight in layers]
    return weights


def average(size: int) -> int:
    """Rows in a bucket, on average."""
    step = next(step for top, step in STEPS if size <= top)
    return size - step // 2


def measure(bench: Bench, config: ModelConfig, weights: dict[str, Weights], size: int, row: Row) -> None:
    """One bucket: microseconds of a layer's projections, each way."""
    total: dict[str, float | None] = dict.fromkeys(PRODUCTS, 0.0)
    for parts in weights.values():
        x = torch.empty(size, parts[0][0].shape[1], dtype=torch.bfloat16, device=bench.device).normal_()
        real = torch.full((1,), average(size), dtype=torch.int32, device=bench.device)
        for way, product in PRODUCTS.items():
            before, spent = total[way], None
            try:
                spent = bench.graph(partial(every, product, x, parts, real), REPEATS)
            except Exception as error:  # of `vgemm`, which may not take what the library takes
                if bench.toy or way == "library":
                    raise
                row.note = f"{way} failed: {brief(error)}"
            total[way] = None if before is None or spent is None else before + 1e3 * spent / len(parts)
    operations = 2.0 * size * sum(n * k for n, k in projections(config).values())
    row.figures |= total
    row.figures["x library"] = ratio(total["vgemm"], total["library"])
    row.figures["TFLOP/s"] = None if total["library"] is None else operations / total["library"] / 1e6


def every(
    product: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor], x: Tensor, weights: Weights, rows: Tensor
) -> None:
    """The product with each of the weights; results are dropped, so one's memory serves the next."""
    for weight, bias in weights:
        product(x, weight, rows, bias)
