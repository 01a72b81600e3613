"""The attention backends by name. Each plans a forward's segments once; every layer then attends with that plan."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from lopa_dist.kernels import exact_attention, native, segment_attention
from lopa_dist.kernels.dispatch import TRITON
from lopa_dist.kernels.meta_attention import MOST_DIM, MetaPlan, attend_meta, attend_tiles_plain, split_for
from lopa_dist.kernels.segment_attention import Segments, attend_grouped, attend_plain
from lopa_dist.kernels.tiles import Capacity, Split, matrix_rows, tile


class AttentionKernel(Protocol):
    """An attention backend."""

    def plan(self, segments: Segments, rows: int) -> Any:
        """Return what `attend` must know about a forward's segments. `rows` counts packed rows, padding included."""

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, plan: Any) -> Tensor:
        """Return attention ``[R, H, D]`` of ``q [R, H, D]`` over one layer of the pool: K and V ``[slots, Hkv, D]``."""


class Plain:
    """The reference implementation, one segment at a time."""

    def plan(self, segments: Segments, rows: int) -> Segments:
        return segments

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, plan: Segments) -> Tensor:
        return attend_plain(q, keys, values, plan)


class Grouped:
    """torch's own attention, batched over segments of equal shape; K/V are gathered."""

    def __init__(self, heads_per_kv: int, device: torch.device, dtype: torch.dtype) -> None:
        self.heads_per_kv, self.device, self.dtype = heads_per_kv, device, dtype

    def plan(self, segments: Segments, rows: int) -> list[segment_attention.SegmentGroup]:
        return segment_attention.plan(segments, self.heads_per_kv, self.device, self.dtype)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, plan: list[segment_attention.SegmentGroup]) -> Tensor:
        return attend_grouped(q, keys, values, plan)


class Exact:
    """torch's products over fixed tiles of columns: a row's bits depend only on what it sees (`exact_attention`)."""

    def __init__(self, heads: int, kv_heads: int, device: torch.device) -> None:
        self.heads, self.kv_heads, self.device = heads, kv_heads, device
        self.room = exact_attention.Room()

    def plan(self, segments: Segments, rows: int) -> list[exact_attention.Group]:
        return exact_attention.plan(segments, rows, self.heads, self.kv_heads, self.device)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, plan: list[exact_attention.Group]) -> Tensor:
        return exact_attention.attend_exact(q, keys, values, plan, self.room)


class Native:
    """Attention in C, row by row: a row's bits depend only on what it sees (`native`)."""

    def plan(self, segments: Segments, rows: int) -> native.Plan:
        return native.plan(segments)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, plan: native.Plan) -> Tensor:
        return native.attend(q, keys, values, plan)


class Meta:
    """Meta-attention over a table of tiles: Triton on a GPU, the table's reference implementation on a CPU."""

    def __init__(
        self, heads: int, kv_heads: int, dim: int, tile_rows: int, device: torch.device, bounded: bool = False
    ) -> None:
        self.heads, self.kv_heads, self.dim, self.device, self.bounded = heads, kv_heads, dim, device, bounded
        self.tile_rows = tile_rows

    @cached_property
    def split(self) -> Split | None:
        """How stacks are split: on a GPU into as many parts as run at a time, however many stacks a forward has."""
        if self.device.type != "cuda":
            return None
        height = matrix_rows(self.tile_rows, self.heads // self.kv_heads)
        found = split_for(1, self.kv_heads, height, self.device)
        return found and replace(found, room=found.parts)

    def plan(self, segments: Segments, rows: int) -> MetaPlan:
        tiles = tile(segments, self.tile_rows, self.split)
        room = Capacity(len(tiles.table), len(tiles.merges), tiles.parts)
        shape = self.heads, self.kv_heads, self.dim, self.tile_rows
        plan = MetaPlan(rows, room, *shape, tiles.scratch, self.device, bounded=self.bounded)
        plan.fill(tiles)
        return plan

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, plan: MetaPlan) -> Tensor:
        return attend_tiles(q, keys, values, plan)


def attend_tiles(q: Tensor, keys: Tensor, values: Tensor, plan: MetaPlan, out: Tensor | None = None) -> Tensor:
    """Compute meta-attention on the tensors' device: as `attend_meta` on a GPU, as `attend_tiles_plain` on a CPU."""
    return (attend_meta if q.is_cuda else attend_tiles_plain)(q, keys, values, plan, out)


def make(
    name: str,
    heads: int,
    kv_heads: int,
    dim: int,
    tile_rows: int,
    weight: Tensor,
    causal: bool = False,
    in_c: bool = False,
) -> AttentionKernel:
    """Return the backend `name` for a model's shape.

    Args:
        name: torch, meta or plain.
        heads, kv_heads, dim: the model's, on this rank.
        tile_rows: maximum query rows per tile of meta-attention.
        weight: any weight of the model; q, K and V have its device and dtype.
        causal: whether rows may see only part of the cached tokens, and a row's bits must not depend on other rows.
        in_c: whether operations run in C (`dispatch.suits_c`).
    """
    device = weight.device
    if name == "plain":
        return Plain()
    if name == "torch":
        if in_c:
            return Native()
        return Exact(heads, kv_heads, device) if causal else Grouped(heads // kv_heads, device, weight.dtype)
    return Meta(heads, kv_heads, dim, tile_rows, device, bounded=causal)


def suited(device: torch.device, dim: int, kernels: str = "auto") -> str:
    """Return the backend that ``auto`` means on `device`, for head size `dim` and the setting `engine.kernels`."""
    return "meta" if device.type == "cuda" and TRITON and dim <= MOST_DIM and kernels != "torch" else "torch"
