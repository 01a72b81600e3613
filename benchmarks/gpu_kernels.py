"""Compare our kernels' speed with that of libraries on a GPU: stages of ``python -m benchmarks.gpu_first --bench``.

Attention: branches of several sequences. Each branch sees its sequence's prefix and its own window. Torch's functions
get K/V that are laid out for them in advance, with a copy for each branch. That favours them, because the layout is not
timed.

Products: the rows of a bucket times the four projections of a layer. The library multiplies the whole bucket. `vgemm`
multiplies as many rows as a bucket holds on average, and reads their number from the device. The engine uses the
library's products, and `vgemm` for `engine.reproducible` and int8 weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.first_facts import Fact, Making
from benchmarks.gpu_clock import Clock
from benchmarks.gpu_shapes import models, plan_of
from benchmarks.roofline import Bar, judged, projections, ratio
from lopa_dist.engine.buckets import STEPS, ladder
from lopa_dist.kernels.attention import attend_tiles
from lopa_dist.kernels.meta_attention import split_for
from lopa_dist.kernels.segment_attention import Segments
from lopa_dist.kernels.tiles import matrix_rows, tile_rows_for
from lopa_dist.kernels.virtual_gemm import vgemm
from lopa_dist.models.config import ModelConfig
from lopa_dist.ragged import ragged_arange

CACHES = 16  # a run's K/V or weights are at least this many times the L2 cache's size, if the model has enough layers
TOLERANCE = 0.02  # the largest difference allowed between two ways of attention; results are about 0.1
REPEATS = 7  # timed runs of each product

Attend = Callable[[int], Tensor]  # computes the attention of a layer
Weights = Sequence[tuple[Tensor, "Tensor | None"]]
"""Weights ``[N, K]`` of one shape, each with its bias ``[N]`` or None."""


@dataclass(frozen=True)
class Mix:
    """A batch: the sequences, by their prefixes, and the branches of each sequence, all with the same window."""

    prefixes: tuple[int, ...]
    branches: int
    window: int

    def __str__(self) -> str:
        low, high = min(self.prefixes), max(self.prefixes)
        prefix = str(low) if low == high else f"{low} to {high}"
        return f"{len(self.prefixes)} sequences, prefix {prefix}, {self.branches} branches of {self.window}"

    def segments(self) -> Segments:
        """Return the branches' segments, packed sequence by sequence; their own K/V are after all prefixes' K/V."""
        prefixes = np.array(self.prefixes)
        count = len(prefixes) * self.branches
        start = np.arange(count) * self.window
        base = np.repeat(np.cumsum(prefixes) - prefixes, self.branches)
        hi = np.full(count * self.window, self.window)
        own = int(prefixes.sum()) + start
        return Segments(start, np.full(count, self.window), base, np.repeat(prefixes, self.branches), own, hi)


RAGGED = (256, 384, 640, 768, 1024, 1280, 1664, 2048)
MIXES = (
    Mix(RAGGED, 4, 32), Mix(RAGGED, 8, 32), Mix(RAGGED, 8, 64), Mix((1024,), 8, 64), Mix((1024,) * 32, 4, 32),
    Mix((1024,), 1, 32),
)  # fmt: skip
TOY_MIXES = (Mix((4, 6, 10), 3, 2), Mix((16,), 1, 4))


def attention(device: torch.device) -> Iterator[Fact]:
    """Yield comparisons of meta-attention with torch's ways; LLaDA comes first, because it has a bar of its own."""
    clock = Clock(device)
    for name, config in reversed(models(device).items()):
        for mix in MIXES if clock.gpu else TOY_MIXES:
            yield f"{name}, {mix}", partial(compare, clock, config, mix)


def compare(clock: Clock, config: ModelConfig, mix: Mix) -> dict[str, Any]:
    """Measure the microseconds per layer of every way of attention, over the same rows, layer after layer."""
    device, segments = clock.device, mix.segments()
    total, slots = len(segments.hi), sum(mix.prefixes) + len(segments.hi)
    heads, kv_heads, dim = config.heads, config.kv_heads, config.head_dim
    layers = min(max(-(-CACHES * clock.cache // (4 * slots * kv_heads * dim)), 2), config.layers)
    noise = partial(torch.randn, dtype=torch.bfloat16, device=device)
    keys, values = (noise(layers, slots, kv_heads, dim) for _ in range(2))
    q = noise(total, heads, dim)

    def measure(attend: Attend) -> float | None:
        def every_layer() -> None:
            for layer in range(layers):  # each result is dropped, so the next one can take its memory
                attend(layer)

        return ratio(clock.graph(every_layer), layers / 1e3)

    stack = mix.window * mix.branches
    height = matrix_rows(tile_rows_for(heads // kv_heads, stack), heads // kv_heads)
    plan = plan_of(segments, total, config, stack, split_for(len(mix.prefixes), kv_heads, height, device), device)

    def ours(layer: int) -> Tensor:
        return attend_tiles(q, keys[layer], values[layer], plan)

    expected = ours(0)
    figures, failed = {"us a layer": measure(ours)}, {}
    stock = {"padded SDPA": padded, "varlen": by_branch}
    for name, way in stock.items():
        try:
            attend = way(segments, q, keys, values)
            difference = float((attend(0).reshape_as(expected) - expected).abs().max())
            if not difference <= TOLERANCE:
                raise ArithmeticError(f"differs from meta-attention by {difference:.3g}")
            figures[name] = measure(attend)
        except Exception as error:  # if a library fails, that is not our fault
            failed[f"{name} failed"] = f"{type(error).__name__}: {error}"
    times = [time for name in stock if (time := figures.get(name)) is not None]
    figures["x padded SDPA"] = ratio(figures.get("padded SDPA"), figures["us a layer"])
    figures["x best stock"] = ratio(min(times, default=None), figures["us a layer"])
    bars = [Bar("x best stock", 0.9, False)]
    if heads == kv_heads and mix.branches > 1:
        bars.append(Bar("x padded SDPA", 1.5, False))
    return judged(figures, *bars) | failed


def columns_of(segments: Segments, which: np.ndarray[Any, Any], column: np.ndarray[Any, Any]) -> Tensor:
    """Return the K/V slots of the columns `column` of the segments `which`.

    Columns after a segment's last one get the last one's slot.
    """
    own = np.minimum(column - segments.shared[which], segments.rows[which] - 1)
    slots = np.where(own < 0, segments.shared_base[which] + column, segments.own_base[which] + own)
    return torch.from_numpy(slots)


def padded(segments: Segments, q: Tensor, keys: Tensor, values: Tensor) -> Attend:
    """Return torch's attention, with a batch row for each branch; query heads with the same K/V head are stacked."""
    count, n, kv_heads = len(segments.rows), int(segments.rows[0]), keys.shape[2]
    columns = segments.shared + segments.rows
    c = np.arange(-(-int(columns.max()) // 8) * 8)
    index = columns_of(segments, np.arange(count)[:, None], c).to(q.device)
    query = q.view(count, n, kv_heads, -1, q.shape[2]).permute(0, 2, 3, 1, 4)  # [N, Hkv, G, n, D]
    group = query.shape[2]
    query, mask = query.flatten(2, 3), None
    if int(columns.min()) < len(c):
        mask = torch.from_numpy(c < columns[:, None])[:, None, None].to(q.device).expand(-1, 1, query.shape[2], -1)
    laid_out = [(k[index].transpose(1, 2), v[index].transpose(1, 2)) for k, v in zip(keys, values, strict=True)]

    def attend(layer: int) -> Tensor:
        result = F.scaled_dot_product_attention(query, *laid_out[layer], mask)
        return result.unflatten(2, (group, n)).permute(0, 3, 1, 2, 4)

    return attend


def by_branch(segments: Segments, q: Tensor, keys: Tensor, values: Tensor) -> Attend:
    """Return torch's varlen_attn, with a sequence for each branch and all K/V in one row; a CPU cannot run it."""
    from torch.nn.attention import varlen

    columns = segments.shared + segments.rows
    which = np.repeat(np.arange(len(columns)), columns)
    index = columns_of(segments, which, ragged_arange(columns)).to(q.device)
    laid_out = [(k[index], v[index]) for k, v in zip(keys, values, strict=True)]
    cu_q, cu_k = (
        torch.from_numpy(np.append(0, np.cumsum(x)).astype(np.int32)).to(q.device) for x in (segments.rows, columns)
    )
    longest = int(segments.rows.max()), int(columns.max())
    # torch 2.11 has no such argument
    grouped: dict[str, Any] = {"enable_gqa": True} if q.shape[1] != keys.shape[2] else {}

    def attend(layer: int) -> Tensor:
        result = varlen.varlen_attn(q, *laid_out[layer], cu_q, cu_k, *longest, **grouped)
        assert isinstance(result, Tensor)
        return result

    return attend


def library(x: Tensor, weight: Tensor, rows: Tensor, bias: Tensor | None) -> Tensor:
    """Return the library's product of all rows, padding included; `rows` is not read."""
    return F.linear(x, weight, bias)


PRODUCTS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]] = {"library": library, "vgemm": vgemm}


def products(device: torch.device) -> Iterator[Fact]:
    """Yield the times of the products of every bucket, by the library and by `vgemm`."""
    clock, weights = Clock(device), dict[str, Weights]()

    def make(config: ModelConfig) -> dict[str, Any]:
        weights.clear()
        weights.update(weights_of(clock, config))
        return {"layers": {name: len(layers) for name, layers in weights.items()}}

    for name, config in models(device).items():
        yield f"{name}: weights", Making(partial(make, config))
        for size in ladder() if clock.gpu else (32, 64):
            yield f"{name}, {size} rows", partial(bucket_of, clock, weights, size)


def weights_of(clock: Clock, config: ModelConfig) -> dict[str, Weights]:
    """Return random weights of a layer's projections, for more layers than fit in the L2 cache."""
    weights: dict[str, Weights] = {}
    empty = partial(torch.empty, dtype=torch.bfloat16, device=clock.device)
    for name, (n, k) in projections(config).items():
        count = min(max(-(-CACHES * clock.cache // (2 * n * k)), 2), config.layers)
        bias = empty(n).zero_() if name == "qkv" and config.qkv_bias else None
        weights[name] = [(empty(n, k).normal_(0, 0.02), bias) for _ in range(count)]
    return weights


def bucket_of(clock: Clock, weights: dict[str, Weights], size: int) -> dict[str, Any]:
    """Measure the microseconds of a layer's projections in a bucket of `size` rows, in each way."""
    step = next(step for top, step in STEPS if size <= top)
    rows = torch.full((1,), size - step // 2, dtype=torch.int32, device=clock.device)
    spent: dict[str, float | None] = {}
    for way, multiply in PRODUCTS.items():
        times = []
        for layers in weights.values():
            x = torch.randn(size, layers[0][0].shape[1], dtype=torch.bfloat16, device=clock.device)

            def every_layer(x: Tensor = x, layers: Weights = layers, multiply: Any = multiply) -> None:
                for weight, bias in layers:
                    multiply(x, weight, rows, bias)

            times.append(ratio(clock.graph(every_layer, REPEATS), len(layers) / 1e3))
        spent[f"{way} us"] = None if None in times else sum(time for time in times if time is not None)
    return judged({**spent, "x library": ratio(spent["vgemm us"], spent["library us"])}, Bar("x library", 1.0))
