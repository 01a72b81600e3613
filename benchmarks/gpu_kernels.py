"""How fast the kernels are beside the libraries' on a GPU: stages of ``python -m benchmarks.gpu_first --bench``.

Attention: branches of several sequences, each of which sees its sequence's prefix and its own window. Torch's ways get
K/V laid out for them beforehand, a copy for every branch, and do not pay for it: that favours them.

Products: a bucket's rows times a layer's four projections. The library multiplies the whole bucket; `vgemm` as many
rows as there are in it on average, which it reads from the device. The engine takes the library's, and `vgemm` for
`engine.reproducible` and int8 weights.
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

from benchmarks.first_facts import Fact
from benchmarks.gpu_clock import Clock
from benchmarks.gpu_shapes import models, plan_of
from benchmarks.roofline import Bar, judged, projections, ratio
from lopa_dist.engine.buckets import STEPS, ladder
from lopa_dist.engine.static_runner import split_for
from lopa_dist.kernels.attention import attend_tiles
from lopa_dist.kernels.segment_attention import Segments
from lopa_dist.kernels.tiles import matrix_rows, tile_rows_for
from lopa_dist.kernels.virtual_gemm import vgemm
from lopa_dist.models.config import ModelConfig
from lopa_dist.ragged import ragged_arange

CACHES = 16  # K/V and weights of a run are at least so many times the L2 cache, where the model has as many layers
TOLERANCE = 0.02  # the largest difference between two ways of attention; results are about 0.1
REPEATS = 7  # of products

Attend = Callable[[int], Tensor]  # of a layer
Weights = Sequence[tuple[Tensor, "Tensor | None"]]
"""Weights ``[N, K]`` of one shape, each with its bias ``[N]`` or null."""


@dataclass(frozen=True)
class Mix:
    """Sequences by their prefixes, each with so many branches of one window."""

    prefixes: tuple[int, ...]
    branches: int
    window: int

    def __str__(self) -> str:
        low, high = min(self.prefixes), max(self.prefixes)
        prefix = str(low) if low == high else f"{low} to {high}"
        return f"{len(self.prefixes)} sequences, prefix {prefix}, {self.branches} branches of {self.window}"

    def segments(self) -> Segments:
        """The branches, packed sequence by sequence; scratch lies behind the prefixes."""
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
    """Meta-attention beside torch's ways; LLaDA's heads, of which the higher bar is, come first."""
    clock = Clock(device)
    for name, config in reversed(models(device).items()):
        for mix in MIXES if clock.gpu else TOY_MIXES:
            yield f"{name}, {mix}", partial(compare, clock, config, mix)


def compare(clock: Clock, config: ModelConfig, mix: Mix) -> dict[str, Any]:
    """Every way over the same rows, layer after layer; microseconds a layer."""
    device, segments = clock.device, mix.segments()
    total, slots = len(segments.hi), sum(mix.prefixes) + len(segments.hi)
    heads, kv_heads, dim = config.heads, config.kv_heads, config.head_dim
    layers = min(max(-(-CACHES * clock.cache // (4 * slots * kv_heads * dim)), 2), config.layers)
    noise = partial(torch.randn, dtype=torch.bfloat16, device=device)
    keys, values = (noise(layers, slots, kv_heads, dim) for _ in range(2))
    q = noise(total, heads, dim)

    def measure(attend: Attend) -> float | None:
        def every_layer() -> None:
            for layer in range(layers):  # results are dropped, so one's memory serves the next
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
        except Exception as error:  # a library's failure is not ours
            failed[f"{name} failed"] = f"{type(error).__name__}: {error}"
    times = [time for name in stock if (time := figures.get(name)) is not None]
    figures["x padded SDPA"] = ratio(figures.get("padded SDPA"), figures["us a layer"])
    figures["x best stock"] = ratio(min(times, default=None), figures["us a layer"])
    bars = [Bar("x best stock", 0.9, False)]
    if heads == kv_heads and mix.branches > 1:
        bars.append(Bar("x padded SDPA", 1.5, False))
    return judged(figures, *bars) | failed


def columns_of(segments: Segments, which: np.ndarray[Any, Any], column: np.ndarray[Any, Any]) -> Tensor:
    """The K/V slots of columns of segments, those behind a segment's last one being its last one."""
    own = np.minimum(column - segments.shared[which], segments.rows[which] - 1)
    slots = np.where(own < 0, segments.shared_base[which] + column, segments.own_base[which] + own)
    return torch.from_numpy(slots)


def padded(segments: Segments, q: Tensor, keys: Tensor, values: Tensor) -> Attend:
    """Torch's attention, a branch a batch row, query heads of a K/V head stacked."""
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
    """Torch's varlen_attn, a branch a sequence, its K/V laid out one behind the other; not on a CPU."""
    from torch.nn.attention import varlen

    columns = segments.shared + segments.rows
    which = np.repeat(np.arange(len(columns)), columns)
    index = columns_of(segments, which, ragged_arange(columns)).to(q.device)
    laid_out = [(k[index], v[index]) for k, v in zip(keys, values, strict=True)]
    cu_q, cu_k = (
        torch.from_numpy(np.append(0, np.cumsum(x)).astype(np.int32)).to(q.device) for x in (segments.rows, columns)
    )
    longest = int(segments.rows.max()), int(columns.max())

    def attend(layer: int) -> Tensor:
        result = varlen.varlen_attn(q, *laid_out[layer], cu_q, cu_k, *longest, enable_gqa=True)
        assert isinstance(result, Tensor)
        return result

    return attend


def library(x: Tensor, weight: Tensor, rows: Tensor, bias: Tensor | None) -> Tensor:
    """The library's product of all rows, padding included."""
    return F.linear(x, weight, bias)


PRODUCTS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]] = {"library": library, "vgemm": vgemm}


def products(device: torch.device) -> Iterator[Fact]:
    """Every bucket, by the library and by `vgemm`."""
    clock, weights = Clock(device), dict[str, Weights]()

    def make(config: ModelConfig) -> dict[str, Any]:
        weights.clear()
        weights.update(weights_of(clock, config))
        return {"layers": {name: len(layers) for name, layers in weights.items()}}

    for name, config in models(device).items():
        yield f"{name}: weights", partial(make, config)
        for size in ladder() if clock.gpu else (32, 64):
            yield f"{name}, {size} rows", partial(bucket_of, clock, weights, size)


def weights_of(clock: Clock, config: ModelConfig) -> dict[str, Weights]:
    """Random weights of a layer's projections, of so many layers that no cache holds them."""
    weights: dict[str, Weights] = {}
    empty = partial(torch.empty, dtype=torch.bfloat16, device=clock.device)
    for name, (n, k) in projections(config).items():
        count = min(max(-(-CACHES * clock.cache // (2 * n * k)), 2), config.layers)
        bias = empty(n).zero_() if name == "qkv" and config.qkv_bias else None
        weights[name] = [(empty(n, k).normal_(0, 0.02), bias) for _ in range(count)]
    return weights


def bucket_of(clock: Clock, weights: dict[str, Weights], size: int) -> dict[str, Any]:
    """Microseconds of a layer's projections, each way."""
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
