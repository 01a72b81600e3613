"""Meta-attention: one kernel over a table of tiles serves prompts, windows and stacked branches (XY-Serve, section 3).

The table is at a fixed address on the device and has a fixed capacity. The kernel reads the actual number of tiles, so
a captured CUDA graph runs any batch that fits. Where rows are bounded, as in causal models, there are far fewer tiles
than the table has room for, so only as many programs as run at a time are launched, and loop over the tiles. Elsewhere
each tile has its own program, and surplus programs exit at once.

Nothing is tuned at run time. For a given tile height and `Split`, a row's bits depend on the rows of its own stack and
on nothing else in the batch. Where prompts begin alike, the batch decides which sequences share a stack (`tiles.tile`).
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lopa_dist.kernels.dispatch import OPTIONS, processors, shared_memory
from lopa_dist.kernels.tiles import FIELDS, MERGE_FIELDS, Capacity, Ints32, Split, Tiles, matrix_rows
from lopa_dist.ragged import UNBOUNDED
from lopa_dist.staging import pinned

MERGED_ROWS = 16  # matrix rows per program of the merge
MOST_DIM = 128  # of a head
TWO_FIT = 128 * 1024  # bytes of shared memory of a block, from which two programs of 64 rows fit a multiprocessor
MERGES = 16  # programs of the merge that fit a multiprocessor
PROCESSORS = 132  # multiprocessors of an H100 or H200; assumed on a CPU, which has none


@dataclass(frozen=True)
class Launch:
    """How the kernel is launched. All fields affect speed; `columns` also affects bits."""

    columns: int  # K/V columns per step
    warps: int
    stages: int  # of the software pipeline that loads K/V


def launch_for(height: int, dim: int, dtype: torch.dtype, capability: tuple[int, int]) -> Launch:
    """Return a launch for the tile matrix's height, the head size, the dtype and the GPU's compute capability.

    It is chosen by the resources that the compiled kernels use: a multiprocessor holds two programs of 64 rows where a
    block may have `TWO_FIT` bytes of shared memory, and else one.
    """
    if dtype == torch.float32:
        return Launch(16 if dim > 64 else 32, 8 if height == 128 else 4, 2)  # else it spills, or is too large for sm_89
    if height == 128:
        return Launch(64 if capability < (12, 0) else 32, 8, 3)  # where wider steps spill registers
    return Launch(64, 4, 3 if capability >= (9, 0) or height < 64 or dim <= 64 else 2)


def resident(height: int, device: torch.device) -> int:
    """Return how many programs of attention fit on a multiprocessor at a time, by the height of tiles."""
    return 1 if height == 128 or shared_memory(device) < TWO_FIT else 2


def split_for(sequences: int, kv_heads: int, height: int, device: torch.device) -> Split | None:
    """Return how stacks are split if each of `sequences` sequences has one; None if a stack has too few programs.

    The programs of all stacks together can run at the same time, because any that had to wait would double the time.
    This also bounds the memory for their results. `height` is the height of a tile's matrix.
    """
    programs = resident(height, device) * (processors(device) if device.type == "cuda" else PROCESSORS)
    parts = programs // (sequences * kv_heads)
    return Split(parts) if parts > 1 else None


@dataclass
class Partials:
    """Partial results until they are merged. Plans that do not run at the same time may share one."""

    results: Tensor  # [P, Hkv, height, D] fp32
    lse: Tensor  # [P, Hkv, height] fp32, base 2

    @classmethod
    def empty(cls, parts: int, kv_heads: int, height: int, dim: int, device: torch.device) -> Partials:
        """Return uninitialised room for `parts` parts."""
        shape = (parts, kv_heads, height)
        made = (torch.empty(size, dtype=torch.float32, device=device) for size in ((*shape, dim), shape))
        return cls(*made)


class MetaPlan:
    """A table of tiles on the device with room for `capacity`: one per CUDA graph, refilled for every forward."""

    def __init__(
        self,
        rows: int,
        capacity: Capacity,
        heads: int,
        kv_heads: int,
        dim: int,
        tile_rows: int,
        scratch: int,
        device: torch.device,
        partials: Partials | None = None,
        launch: Launch | None = None,
        bounded: bool = False,
        whole: bool = True,
    ) -> None:
        """Allocate the table, and room for partial results unless it is shared.

        Args:
            rows: maximum packed rows, padding included.
            capacity: maximum tiles, merges and parts, see `tiles.capacity`.
            heads, kv_heads, dim: the model's, on this rank.
            tile_rows: as in `tiles.tile`.
            scratch: pool slot of packed row 0; the same for every batch.
            partials: another plan's, to share.
            launch: replaces that of `launch_for`.
            bounded: whether rows may see only part of the cached tokens (`Segments.seen`). Steps over columns then
                begin at fixed tokens.
            whole: whether steps over a range of cached tokens may begin where the range does, which is faster.
                Otherwise they begin at fixed tokens, so that a row has the same bits wherever two ranges meet.

        Raises:
            ValueError: the kernel does not support the number of heads, the head size or the tile height, or the shared
                partials have another shape.
        """
        if heads % kv_heads:
            raise ValueError(f"{heads} query heads do not share {kv_heads} K/V heads evenly")
        if dim > MOST_DIM:
            raise ValueError(f"meta-attention takes heads of at most {MOST_DIM} numbers, not {dim}: use torch's")
        self.filled: Ints32 | None = None  # the table that is on the device
        self.height = matrix_rows(tile_rows, heads // kv_heads)
        if self.height > 128:
            raise ValueError(
                f"a tile of {tile_rows} rows with {heads // kv_heads} query heads per K/V head has more than 128 matrix"
                " rows: take tile_rows from tile_rows_for"
            )
        self.rows, self.capacity, self.heads, self.kv_heads, self.dim = rows, capacity, heads, kv_heads, dim
        self.tile_rows, self.scratch, self.launch = tile_rows, scratch, launch
        self.bounded, self.whole = bounded, whole
        sizes = [2, rows, rows, rows, rows, rows, capacity.tiles * FIELDS, capacity.merges * MERGE_FIELDS]
        starts = np.cumsum([0, *(-(-size // 4) * 4 for size in sizes)])  # aligned to 16 bytes
        self.spans = [slice(int(start), int(start) + size) for start, size in zip(starts, sizes, strict=False)]
        self.buffer = torch.zeros(int(starts[-1]), dtype=torch.int32, device=device)
        views = [self.buffer[span] for span in self.spans]
        self.counts, self.seen, self.lo, self.hi, self.depth, self.until, table, merges = views
        self.table, self.merges = table.view(-1, FIELDS), merges.view(-1, MERGE_FIELDS)
        shape = (capacity.parts, kv_heads, self.height, dim)
        self.partials = partials or Partials.empty(*shape, device)
        found = tuple(self.partials.results.shape)
        if found[0] < shape[0] or found[1:] != shape[1:]:
            raise ValueError(f"shared partial results of {found} do not hold parts of {shape}")

    def fill(self, tiles: Tiles) -> None:
        """Copy a forward's tiles to the device, unless they are there already. The host does not wait for the copy.

        `Tiles.until`, which is on the device, is copied each time.

        Raises:
            ValueError: the tiles do not fit, or were made for another pool or tile height.
        """
        needs = (len(tiles.lo), len(tiles.table), len(tiles.merges), tiles.parts)
        room = (self.rows, self.capacity.tiles, self.capacity.merges, self.capacity.parts)
        if any(need > has for need, has in zip(needs, room, strict=True)):
            raise ValueError(f"rows, tiles, merges and parts {needs} exceed the plan's {room}")
        if tiles.tile_rows != self.tile_rows or (len(tiles.table) and tiles.scratch != self.scratch):
            raise ValueError(
                f"tiles of {tiles.tile_rows} rows with scratch at {tiles.scratch}, in a plan for {self.tile_rows} rows"
                f" and {self.scratch}"
            )
        if tiles.table is not self.filled:
            sent = np.zeros(len(self.buffer), np.int32)
            parts = (
                np.array(needs[1:3], np.int32),
                tiles.seen,
                tiles.lo,
                tiles.hi,
                tiles.depth,
                np.full(len(tiles.hi), UNBOUNDED, np.int32),
                tiles.table.ravel(),
                tiles.merges.ravel(),
            )
            for span, part in zip(self.spans, parts, strict=True):
                sent[span.start : span.start + len(part)] = part
            self.buffer.copy_(pinned(sent, self.buffer.device), non_blocking=True)
            self.filled = tiles.table
        if tiles.until is not None:
            self.until[: len(tiles.until)] = tiles.until


def attend_tiles_plain(q: Tensor, keys: Tensor, values: Tensor, plan: MetaPlan, out: Tensor | None = None) -> Tensor:
    """Compute `attend_meta` on any device, one tile at a time: the table's reference implementation."""
    out = torch.zeros_like(q) if out is None else out
    kv_heads, dim = plan.kv_heads, plan.dim
    numbers = torch.arange(max(len(plan.until), len(keys)), device=q.device)
    tiles, merges = plan.counts.tolist()
    parts: dict[int, tuple[Tensor, Tensor]] = {}
    for q0, rows, s0_base, s0, s1_base, s1, c0, c1, part, begin, first, q1 in plan.table[:tiles].tolist():
        ranges = (s0_base, s0), (s1_base, s1), (plan.scratch + c0, c1 - c0)
        k, v = (torch.cat([x[at : at + count] for at, count in ranges]).float() for x in (keys, values))
        at, own = rows_at(q0, rows, first, q1), numbers[c0:c1]
        unseen = torch.empty(rows, len(k), dtype=torch.bool, device=q.device)
        unseen[:, : s0 + s1] = begin + numbers[: s0 + s1] >= plan.seen[at, None]
        unseen[:, s0 + s1 :] = (own < plan.lo[at, None]) | (own >= plan.hi[at, None])
        unseen[:, s0 + s1 :] |= plan.depth[at, None] >= plan.until[own]
        # the query heads of a K/V head share its keys: [Hkv, rows x group, D]
        queries = q[at].float().view(rows, kv_heads, -1, dim).transpose(0, 1).reshape(kv_heads, -1, dim)
        scores = (queries @ k.permute(1, 2, 0) * dim**-0.5).view(kv_heads, rows, -1, len(k))
        scores.masked_fill_(unseen[:, None], -torch.inf)
        lse = scores.logsumexp(3)  # -inf where a row sees nothing of this tile
        weights = (scores - lse[..., None]).exp_().nan_to_num_()
        found = (weights.view(kv_heads, -1, len(k)) @ v.transpose(0, 1)).view(kv_heads, rows, -1, dim)
        result, lse = found.transpose(0, 1).flatten(1, 2), lse.transpose(0, 1).flatten(1)  # [rows, H, D], [rows, H]
        if part < 0:
            out[at] = result.to(q.dtype)
        else:
            parts[part] = result, lse
    for q0, rows, begin, count, first, q1 in plan.merges[:merges].tolist():
        results, lses = (torch.stack(x) for x in zip(*(parts[begin + p] for p in range(count)), strict=True))
        out[rows_at(q0, rows, first, q1)] = (results * lses.softmax(0).nan_to_num()[..., None]).sum(0).to(q.dtype)
    return out


def programs_for(plan: MetaPlan, device: torch.device) -> int:
    """Return how many programs attend: one per possible tile and K/V head; if bounded, no more than run at a time."""
    most = max(plan.capacity.tiles * plan.kv_heads, 1)
    return min(most, resident(plan.height, device) * processors(device)) if plan.bounded else most


def rows_at(q0: int, rows: int, first: int, q1: int) -> slice | list[int]:
    """Return a tile's packed rows: its `first` rows from `q0` on, and the others from `q1` on."""
    return slice(q0, q0 + rows) if first == rows else [*range(q0, q0 + first), *range(q1, q1 + rows - first)]


def attend_meta(q: Tensor, keys: Tensor, values: Tensor, plan: MetaPlan, out: Tensor | None = None) -> Tensor:
    """Compute attention over the plan's tiles with Triton, and return it.

    Args:
        q: ``[R', H, D]``, with a contiguous last dimension.
        keys, values: one layer of the pool, ``[slots, Hkv, D]``, likewise; slots that no segment sees may hold NaN.
        plan: a filled plan.
        out: ``[R', H, D]``; rows in no segment are left as they are. None: a new tensor, in which they are 0.

    Raises:
        RuntimeError: Triton is missing, or the tensors are not on a GPU.
        ValueError: a tensor's last dimension is not contiguous.
    """
    require_triton(q.device)
    from lopa_dist.kernels.meta_kernels import attend_kernel, merge_kernel

    out = torch.zeros_like(q) if out is None else out
    if max(x.stride(2) for x in (q, keys, values, out)) > 1:
        raise ValueError("meta-attention needs q, keys, values and out with a contiguous last dimension")
    group, dim_tile = plan.heads // plan.kv_heads, max(16, 1 << (plan.dim - 1).bit_length())
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else (9, 0)
    launch = plan.launch or launch_for(plan.height, dim_tile, q.dtype, capability)
    work = plan.partials
    attend_kernel[(programs_for(plan, q.device),)](
        q, keys, values, out, work.results, work.lse, plan.table, plan.seen, plan.lo, plan.hi,
        plan.depth, plan.until, plan.counts, plan.scratch,
        plan.dim**-0.5 * math.log2(math.e),
        *q.stride()[:2], *keys.stride()[:2], *values.stride()[:2], *out.stride()[:2],
        G=group, KV_HEADS=plan.kv_heads, D=plan.dim, D_TILE=dim_tile, BM=plan.height, BN=launch.columns,
        STAGES=launch.stages, BOUNDED=plan.bounded, WHOLE=plan.whole,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=launch.warps, num_stages=launch.stages, **OPTIONS,
    )  # fmt: skip
    if plan.capacity.merges:
        strips = plan.capacity.merges * plan.kv_heads * (plan.height // MERGED_ROWS)
        merge_kernel[(min(strips, MERGES * processors(q.device)) if plan.bounded else strips,)](
            work.results, work.lse, out, plan.merges, plan.counts, *out.stride()[:2],
            G=group, KV_HEADS=plan.kv_heads, D=plan.dim, D_TILE=dim_tile, BM=plan.height, ROWS=MERGED_ROWS,
            num_warps=4, **OPTIONS,
        )  # fmt: skip
    return out


def require_triton(device: torch.device) -> None:
    """Raise a RuntimeError that names the remedy if Triton cannot run on `device`."""
    remedy = "choose engine.attention=torch, or install it with: pip install triton"
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise RuntimeError(f"meta-attention needs Triton, which is not installed: {remedy}") from error
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(
            "meta-attention runs on a GPU: choose engine.attention=torch on a CPU (tests set TRITON_INTERPRET=1)"
        )
