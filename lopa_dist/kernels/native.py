"""A forward's operations on a CPU, in C: a row's bits depend on that row alone, not on what runs beside it.

`native.c` is compiled for this machine's CPU when it is first needed, which takes seconds, and kept in the user's
cache: once for tensors in fp32, and once for bf16. Each number is computed by one chain of operations in a fixed order,
so no tile, thread or other row can change it. That holds by construction, which no matrix library promises. Without a
C compiler, torch's operations run instead, and a job of few sequences takes twice as long.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lopa_dist.c_library import INT, LONG, REMEDY, F, Function, N, P, Unavailable, cpu, load, memory
from lopa_dist.decode.config import record_size
from lopa_dist.kernels.sampling import Sampling
from lopa_dist.kernels.segment_attention import Segments
from lopa_dist.ragged import Ints, ranges

log = logging.getLogger("lopa_dist")
SOURCE = Path(__file__).with_suffix(".c")
CONFIDENCES = ("probability", "margin", "neg_entropy")  # C has their indices
FUNCTIONS: dict[str, Function] = {
    "product": (None, (P, N, P, N, P, P, N, N, N, N, INT, INT)),
    "norm": (None, (P, P, P, P, N, N, F, INT)),
    "swiglu": (None, (P, P, N, N, INT)),
    "rotate_and_store": (None, (P, P, P, P, P, P, P, P, LONG, P, P, F, N, N, N, N, INT)),
    "attend": (INT, (P, N, P, P, P, P, N, P, P, P, N, N, N, F, LONG, INT)),
    "layers": (INT, (P, N, P, N, *[P] * 7, N, P, LONG, P, P, P, N, N, N, N, N, N, N, F, F, P, P, INT)),
    "room_of": (LONG, (N, N, N, N, N, N)),
}
OF_LOGITS: dict[str, Function] = {  # always in fp32
    "reduce": (None, (P, P, N, N, LONG, N, LONG, F, F, LONG, P, INT, INT, INT, P, INT)),
    "records": (None, (P, N, N, INT, INT, P)),
}
NAMES = {"fp32": torch.float32, "bf16": torch.bfloat16}  # as in `model.dtype`


@cache
def found(dtype: torch.dtype = torch.float32) -> ctypes.CDLL | str:
    """Return the library for a dtype, or why there is none.

    It is compiled, loaded and compared with torch once per process.
    """
    if dtype not in NAMES.values():
        return f"there is no form for {dtype}"
    try:
        of_bf16 = dtype == torch.bfloat16
        library = load(SOURCE, FUNCTIONS, "BF16") if of_bf16 else load(SOURCE, FUNCTIONS | OF_LOGITS)
    except Unavailable as error:
        return str(error)
    return library if right(library, dtype) else "compiled operations compute other numbers than torch's"


def right(library: ctypes.CDLL, dtype: torch.dtype) -> bool:
    """Return whether products, the code that depends most on the CPU, agree with torch's."""
    generator = torch.Generator().manual_seed(0)
    for rows in (1, 3, 40):
        x, weight = (torch.randn(n, 78, generator=generator).to(dtype) for n in (rows, 83))
        by_columns, y = weight.t().contiguous(), torch.empty(rows, 83)
        library.product(
            x.data_ptr(), 78, by_columns.data_ptr(), 83, None, y.data_ptr(), 83, rows, 78, 83, True,
            torch.get_num_threads(),
        )  # fmt: skip
        if not torch.allclose(y, x.double().mm(weight.t().double()).float(), atol=1e-3):
            return False
    return True


def fault(dtype: torch.dtype = torch.float32) -> str | None:
    """Return why operations on this CPU run in torch's form, and what to do about it; None: they run in C."""
    library = found(dtype)
    if not isinstance(library, str):
        return None
    return f"operations run in torch's form, which takes twice as long with few sequences: {library} ({REMEDY})"


def form(device: torch.device, dtype: str, kernels: str) -> str:
    """Return what computes: ``C`` or ``torch``, or ``other`` where there is no choice.

    Args:
        device: the model's.
        dtype: its precision, as in `model.dtype`.
        kernels: the setting `engine.kernels`.
    """
    if device.type != "cpu" or dtype not in NAMES:
        return "other"
    return "torch" if kernels == "torch" or isinstance(found(NAMES[dtype]), str) else "C"


def has_bf16() -> bool:
    """Return whether this CPU has bf16 products, which the operations in C then use. Other CPUs widen bf16 to fp32."""
    return "avx512_bf16" in cpu()


@cache
def warn_of_fault(dtype: torch.dtype = torch.float32) -> None:
    """Warn once if operations cannot run in C."""
    if why := fault(dtype):
        log.warning(why)


def library(dtype: torch.dtype = torch.float32) -> ctypes.CDLL:
    """Return the library for a dtype.

    Raises:
        Unavailable: there is none.
    """
    lib = found(dtype)
    if isinstance(lib, str):
        raise Unavailable(lib)
    return lib


def pointer(x: Tensor | None) -> int | None:
    """Return the address of a tensor's numbers, or None without a tensor."""
    return None if x is None else x.data_ptr()


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, in_fp32: bool = False) -> Tensor:
    """Return ``x [R, K] @ weight [K, N] + bias [N]``, ``[R, N]``. In bf16, K is even.

    The rows of `x` and of `weight` may be any distance apart; the numbers of a row are adjacent.
    """
    rows, depth = x.shape
    columns = weight.shape[1]
    y = x.new_empty(rows, columns, dtype=torch.float32 if in_fp32 else x.dtype)
    library(x.dtype).product(
        x.data_ptr(), x.stride(0), weight.data_ptr(), weight.stride(0), pointer(bias), y.data_ptr(), columns,
        rows, depth, columns, in_fp32, torch.get_num_threads(),
    )  # fmt: skip
    return y


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """Return the RMS norm of ``x [R, d]``; with a residual, of the sum of both, which overwrites `x`."""
    y = torch.empty_like(x)
    library(x.dtype).norm(
        x.data_ptr(), pointer(residual), weight.data_ptr(), y.data_ptr(), *x.shape, eps, torch.get_num_threads()
    )
    return y


def swiglu(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` of ``gate_up [R, 2 I]``, the gates first: ``[R, I]``."""
    rows, wide = gate_up.shape
    y = gate_up.new_empty(rows, wide // 2)
    library(gate_up.dtype).swiglu(gate_up.data_ptr(), y.data_ptr(), rows, wide // 2, torch.get_num_threads())
    return y


def rotate_and_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    scratch: int,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    slots: Tensor | None,
) -> Tensor:
    """Do what `kernels.rope.rope_and_store` does, for all rows."""
    kv_heads, dim = keys.shape[1:]
    rows, heads = len(qkv), qkv.shape[1] // dim - 2 * kv_heads
    q_norm, k_norm = norms or (None, None)
    q = qkv.new_empty(rows, heads, dim)
    library(qkv.dtype).rotate_and_store(
        qkv.data_ptr(), q.data_ptr(), cos.data_ptr(), sin.data_ptr(), None, keys.data_ptr(), values.data_ptr(),
        pointer(slots), scratch, pointer(q_norm), pointer(k_norm), eps, rows, heads, kv_heads, dim,
        torch.get_num_threads(),
    )  # fmt: skip
    return q


def reduce(
    logits: Tensor, low: int, width: int, mask_id: int, keys: Tensor | None, sampling: Sampling, second_choices: bool
) -> Tensor:
    """Compute `kernels.record_head._reduce`; overwrites ``logits [R, C]``. With filters, `width` is C."""
    rows, columns = logits.shape
    sums = logits.new_empty(10 if second_choices else 7, rows, columns // width)
    temperature = sampling.divisor if sampling.temperature > 0 else 0.0
    preferences = torch.empty_like(logits) if temperature else None
    library().reduce(
        logits.data_ptr(), pointer(preferences), rows, columns, low, width, mask_id, temperature, sampling.top_p,
        sampling.top_k, pointer(keys), sampling.confidence == "margin", sampling.confidence == "neg_entropy",
        second_choices, sums.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return sums


def records(sums: Tensor, sampling: Sampling) -> Tensor:
    """Compute `kernels.record_head._records`."""
    second_choices, (rows, tiles) = len(sums) > 7, sums.shape[1:]
    sums = sums.contiguous()
    found = torch.empty(rows, record_size(second_choices), dtype=torch.int32)
    library().records(
        sums.data_ptr(), rows, tiles, CONFIDENCES.index(sampling.confidence), second_choices, found.data_ptr()
    )
    return found


class Plan(NamedTuple):
    """What rows see, in the layout that `native.c` reads."""

    segments: Ints  # [G, 7] the fields of its `Segment`
    seen: Ints  # [R] how many columns of its segment each row sees
    depth: Ints | None  # [R] as in `Segments.drafts`
    until: Tensor | None  # [R]
    most: int  # columns that any row sees, at most
    rows: int  # rows of all segments


def plan(segments: Segments) -> Plan:
    """Return the plan for a forward's segments."""
    tail_base, tail = segments.tail or (np.zeros_like(segments.shared), np.zeros_like(segments.shared))
    columns = [segments.start, segments.rows, segments.shared_base, segments.shared, tail_base, tail, segments.own_base]
    cached = segments.seen
    if cached is None:
        cached = np.zeros_like(segments.hi)
        cached[ranges(segments.start, segments.rows)] = (segments.shared + tail).repeat(segments.rows)
    seen = cached + segments.hi
    depth, until = segments.drafts or (None, None)
    most = int(seen.max(initial=0))
    rows = int(segments.rows.sum())
    return Plan(np.ascontiguousarray(np.stack(columns, 1)), seen, depth, until, most, rows)


def attend(q: Tensor, keys: Tensor, values: Tensor, of: Plan) -> Tensor:
    """Return attention ``[R, H, D]`` of ``q [R, H, D]``, whose rows need not be adjacent; rows in no segment give 0."""
    rows, heads, dim = q.shape
    out = (q.new_empty if of.rows == rows else q.new_zeros)(rows, heads, dim)
    depth = None if of.depth is None else memory(of.depth)
    short = library(q.dtype).attend(
        q.data_ptr(), q.stride(0), out.data_ptr(), keys.data_ptr(), values.data_ptr(), memory(of.segments),
        len(of.segments), memory(of.seen), depth, pointer(of.until), heads, keys.shape[1], dim, dim**-0.5,
        of.most, torch.get_num_threads(),
    )  # fmt: skip
    if short:
        raise MemoryError("attention's scores")
    return out


class Shape(NamedTuple):
    """The shape of a model's layers."""

    width: int  # d
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float  # of all norms


class Seen(ctypes.Structure):
    """`Seen` of `native.c`."""

    _fields_ = (*((name, P) for name in ("segments", "seen", "depth", "until")),
                *((name, LONG) for name in ("count", "most", "rows")))  # fmt: skip


class Adapter(NamedTuple):
    """An adapter that acts only on rows that draft (`models.mask_rows`)."""

    pairs: Ints  # [layers, 7, 4] addresses of A and B, rank and outputs: of q, k, v, out, gate, up, down
    widest: int  # numbers of room for a row: most inputs of a projection, plus most of rank and outputs together
    drafts: Tensor  # [R] bool, whether each row drafts


class Drafting(ctypes.Structure):
    """`Drafting` of `native.c`."""

    _fields_ = tuple((name, P) for name in ("pairs", "drafts", "rows", "room"))


def layers(
    weights: Ints,
    shape: Shape,
    embedding: Tensor,
    last_norm: Tensor,
    tokens: Tensor,
    positions: Tensor,
    rotations: tuple[Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    scratch: int,
    slots: Tensor | None,
    sees: Plan,
    wanted: Tensor | None,
    adapter: Adapter | None = None,
) -> Tensor:
    """Return hidden states after all layers and the last norm: ``[W, d]`` of the rows `wanted`, or ``[R, d]`` of all.

    The bits equal those of the operations above, called one by one. With one row, the overhead of those calls would
    take most of the time.

    Args:
        weights: ``[layers, 12]`` addresses of each layer's weights, stored by column, in the order of `Layer` in
            `native.c`; 0: none.
        shape: the shape of the layers.
        embedding: ``[V, d]``, stored by row or by column.
        last_norm: ``[d]``.
        tokens, positions: ``[R]`` int64.
        rotations: cosines and sines ``[..., D]`` by position.
        keys, values: the pool ``[layers, slots, Hkv, D]``; written.
        scratch, slots: where the rows' K/V go, as in `rotate_and_store`.
        sees: what rows see.
        wanted: ``[W]`` int64, numbers of rows; None: all.
        adapter: acts on the rows that draft; None: nothing does.
    """
    count, some = len(tokens), -1 if wanted is None else len(wanted)
    lib, (d, heads, kv_heads, dim, intermediate, eps) = library(embedding.dtype), shape
    room = embedding.new_empty(lib.room_of(max(count, some), d, heads, kv_heads, dim, intermediate))
    y = embedding.new_empty(count if wanted is None else some, d)
    depth = None if sees.depth is None else sees.depth.ctypes.data
    seen = Seen(
        sees.segments.ctypes.data, sees.seen.ctypes.data, depth, pointer(sees.until), len(sees.segments), sees.most,
        sees.rows,
    )  # fmt: skip
    drafting = None
    if adapter is not None:
        drafts = max(int(adapter.drafts.sum()), 0 if wanted is None else int(adapter.drafts[wanted].sum()))
        rows, space = tokens.new_empty(drafts), embedding.new_empty(drafts * adapter.widest)
        drafting = Drafting(adapter.pairs.ctypes.data, adapter.drafts.data_ptr(), rows.data_ptr(), space.data_ptr())
    short = lib.layers(
        weights.ctypes.data, len(weights), embedding.data_ptr(), 0 if embedding.is_contiguous() else len(embedding),
        last_norm.data_ptr(), tokens.data_ptr(), positions.data_ptr(), rotations[0].data_ptr(), rotations[1].data_ptr(),
        keys.data_ptr(), values.data_ptr(), keys.stride(0), pointer(slots), scratch, ctypes.addressof(seen),
        None if drafting is None else ctypes.addressof(drafting), pointer(wanted), some, count, d, heads, kv_heads, dim,
        intermediate, eps, dim**-0.5, room.data_ptr(), y.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    if short:
        raise MemoryError("attention's scores")
    return y
