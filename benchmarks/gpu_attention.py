"""The attention part of `gpu_step`: meta-attention beside what torch has, on LoPA's mixes.

Branches of several sequences, each of which sees its sequence's prefix and its own window. The others get K/V laid out
for them beforehand, a copy for every branch, and do not pay for it ("with gather" does): that favours them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_bench import Bench, Row, brief
from benchmarks.roofline import MODELS, Bar, ratio
from lopa_dist.engine.static_runner import split_for
from lopa_dist.kernels.attention import attend_tiles
from lopa_dist.kernels.meta_attention import MetaPlan
from lopa_dist.kernels.segment_attention import Segments
from lopa_dist.kernels.tiles import Capacity, matrix_rows, tile, tile_rows_for
from lopa_dist.models.config import ModelConfig
from lopa_dist.ragged import ragged_arange

CACHES = 16  # K/V of a run are at least so many times the L2 cache
TOLERANCE = 0.02  # the largest difference between two ways; results are about 0.1
OTHERS = ("padded SDPA", "with gather", "varlen")
STOCK = ("padded SDPA", "varlen")


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


RAGGED = (256, 384, 640, 768, 1024, 1280, 1664, 2048)
MIXES = (
    Mix(RAGGED, 4, 32), Mix(RAGGED, 8, 32), Mix(RAGGED, 8, 64), Mix((1024,), 8, 64), Mix((1024,) * 32, 4, 32),
    Mix((1024,), 1, 32),
)  # fmt: skip


def rows() -> list[Row]:
    """The table's rows."""
    made = []
    for name, config in MODELS.items():
        for mix in MIXES:
            figures = ("us a layer", *OTHERS, "x padded SDPA", "x best stock", "TFLOP/s")
            bars = [Bar("x best stock", 0.9, False)]
            if config.heads == config.kv_heads and mix.branches > 1:
                bars.insert(0, Bar("x padded SDPA", 1.5, False))
            made.append(Row("attention", f"{name}, {mix}", dict.fromkeys(figures), bars))
    return made


@torch.inference_mode()
def run(bench: Bench, table: list[Row]) -> None:
    """Measure."""
    cases = [(config, mix) for config in MODELS.values() for mix in MIXES]
    order = sorted(range(len(cases)), key=lambda i: cases[i][0].heads != cases[i][0].kv_heads)  # the bar's shape first
    for i in order:
        config, mix = cases[i]
        if bench.toy:
            mix = Mix(tuple(n // 64 for n in mix.prefixes[:8]), mix.branches, mix.window // 16)
        bench.fill(table[i], partial(measure, bench, bench.shape(config), mix))


def measure(bench: Bench, config: ModelConfig, mix: Mix, row: Row) -> None:
    """One mix: every way over the same rows, layer after layer."""
    device, segments = bench.device, segments_of(mix)
    total, slots = len(segments.hi), int(sum(mix.prefixes)) + len(segments.hi)
    heads, kv_heads, dim = config.heads, config.kv_heads, config.head_dim
    layers = min(max(-(-CACHES * bench.cache // (4 * slots * kv_heads * dim)), 2), config.layers)
    shape = (layers, slots, kv_heads, dim)
    keys, values = (torch.empty(shape, dtype=torch.bfloat16, device=device).normal_() for _ in range(2))
    q = torch.empty(total, heads, dim, dtype=torch.bfloat16, device=device).normal_()

    ours = meta(segments, config, mix, q, keys, values)
    ways: dict[str, Callable[[], Attend]] = {
        "meta": lambda: ours,
        "padded SDPA": lambda: padded(segments, q, keys, values),
        "with gather": lambda: padded(segments, q, keys, values, gather=True),
        "varlen": lambda: by_branch(segments, q, keys, values, stock_varlen(device)),
    }

    wanted = ours(0)
    times: dict[str, float | None] = {}
    for name, make in ways.items():
        try:
            attend = make()
            difference = float((attend(0).reshape_as(wanted) - wanted).abs().max())
            if not difference <= TOLERANCE:
                raise ArithmeticError(f"{name} differs from meta-attention by {difference:.3g}")
            spent = bench.graph(partial(every, attend, layers))
            times[name] = None if spent is None else 1e3 * spent / layers
        except Exception as error:  # another's failure is not ours
            if bench.toy or name == "meta":
                raise
            times[name] = None
            row.note += f"{name} failed: {brief(error)}. "
    mine, there = times.pop("meta"), [times[name] for name in STOCK]
    best = min((t for t in there if t is not None), default=None)
    operations = 4.0 * dim * kv_heads * real(segments, heads // kv_heads)
    row.figures |= times
    row.figures |= {
        "us a layer": mine,
        "x padded SDPA": ratio(times["padded SDPA"], mine),
        "x best stock": ratio(best, mine),
        "TFLOP/s": None if mine is None else operations / mine / 1e6,
    }


Attend = Callable[[int], Tensor]
Varlen = Callable[..., Any]  # with the parameters and result of `torch.nn.attention.varlen.varlen_attn`


def real(segments: Segments, heads_per_kv: int) -> int:
    """Score elements that there are, per K/V head."""
    cached = segments.shared if segments.tail is None else segments.shared + segments.tail[1]
    row = ragged_arange(segments.rows) + np.repeat(segments.start, segments.rows)
    return int((cached * segments.rows).sum() + segments.hi[row].sum()) * heads_per_kv


def every(attend: Attend, layers: int) -> None:
    """All layers; results are dropped, so one's memory serves the next."""
    for layer in range(layers):
        attend(layer)


def segments_of(mix: Mix) -> Segments:
    """The branches, packed sequence by sequence; scratch lies behind the prefixes."""
    prefixes = np.array(mix.prefixes)
    count = len(prefixes) * mix.branches
    start = np.arange(count) * mix.window
    base = np.repeat(np.cumsum(prefixes) - prefixes, mix.branches)
    rows = np.full(count, mix.window)
    own = int(prefixes.sum()) + start
    return Segments(start, rows, base, np.repeat(prefixes, mix.branches), own, np.full(count * mix.window, mix.window))


def meta(segments: Segments, config: ModelConfig, mix: Mix, q: Tensor, keys: Tensor, values: Tensor) -> Attend:
    """Ours, with tiles cut as the static runner cuts them."""
    height = tile_rows_for(config.heads // config.kv_heads, mix.window * mix.branches)
    matrix = matrix_rows(height, config.heads // config.kv_heads)
    tiles = tile(segments, height, split_for(len(mix.prefixes), config.kv_heads, matrix, q.device))
    room = Capacity(len(tiles.table), len(tiles.merges), tiles.parts)
    plan = MetaPlan(len(q), room, config.heads, config.kv_heads, config.head_dim, height, tiles.scratch, q.device)
    plan.fill(tiles)
    return lambda layer: attend_tiles(q, keys[layer], values[layer], plan)


def padded(segments: Segments, q: Tensor, keys: Tensor, values: Tensor, gather: bool = False) -> Attend:
    """Torch's attention, a branch a batch row, query heads of a K/V head stacked; K/V gathered before, or in it."""
    count, n, kv_heads = len(segments.rows), int(segments.rows[0]), keys.shape[2]
    columns = segments.shared + segments.rows
    longest = -(-int(columns.max()) // 8) * 8
    c = np.arange(longest)
    own = c - segments.shared[:, None]
    at = np.where(own < 0, segments.shared_base[:, None] + c, segments.own_base[:, None] + np.minimum(own, n - 1))
    index = torch.from_numpy(at).to(q.device)
    mask = None
    if int(columns.min()) < longest:
        mask = torch.from_numpy(c < columns[:, None])[:, None, None].to(q.device)
    query = q.view(count, n, kv_heads, -1, q.shape[2]).permute(0, 2, 3, 1, 4)  # [N, Hkv, G, n, D]
    group = query.shape[2]
    query = query.flatten(2, 3)
    if mask is not None:
        mask = mask.expand(count, 1, query.shape[2], longest)

    def attend(k: Tensor, v: Tensor) -> Tensor:
        result = F.scaled_dot_product_attention(query, k, v, mask)
        return result.unflatten(2, (group, n)).permute(0, 3, 1, 2, 4)

    def gathered(layer: int) -> tuple[Tensor, Tensor]:
        return keys[layer][index].transpose(1, 2), values[layer][index].transpose(1, 2)

    if gather:
        return lambda layer: attend(*gathered(layer))
    laid_out = [gathered(layer) for layer in range(len(keys))]
    return lambda layer: attend(*laid_out[layer])


def by_branch(segments: Segments, q: Tensor, keys: Tensor, values: Tensor, varlen: Varlen) -> Attend:
    """varlen_attn with a branch a sequence, its K/V laid out one behind the other."""
    columns = segments.shared + segments.rows
    which, c = np.repeat(np.arange(len(columns)), columns), ragged_arange(columns)
    own = c - segments.shared[which]
    at = np.where(own < 0, segments.shared_base[which] + c, segments.own_base[which] + own)
    index = torch.from_numpy(at).to(q.device)
    laid_out = [(k[index], v[index]) for k, v in zip(keys, values, strict=True)]
    cu_q, cu_k = (
        torch.from_numpy(np.append(0, np.cumsum(x)).astype(np.int32)).to(q.device) for x in (segments.rows, columns)
    )
    most = int(segments.rows.max()), int(columns.max())
    return lambda layer: varlen(q, *laid_out[layer], cu_q, cu_k, *most, enable_gqa=True)


def stock_varlen(device: torch.device) -> Varlen:
    """Torch's varlen_attn, or on a CPU, which it has no kernel for, what it computes."""
    if device.type != "cuda":
        return plain_varlen
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


def plain_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, enable_gqa: bool
) -> Tensor:
    """What `varlen_attn` computes."""
    out = torch.empty_like(q)
    repeat = q.shape[1] // k.shape[1]
    for i in range(len(cu_q) - 1):
        rows, columns = slice(int(cu_q[i]), int(cu_q[i + 1])), slice(int(cu_k[i]), int(cu_k[i + 1]))
        keys, values = (x[columns].float().repeat_interleave(repeat, 1) for x in (k, v))
        scores = torch.einsum("rhd,chd->rhc", q[rows].float(), keys) * q.shape[2] ** -0.5
        out[rows] = torch.einsum("rhc,chd->rhd", scores.softmax(2), values).to(q.dtype)
    return out
