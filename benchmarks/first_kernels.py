"""Check each kernel for `gpu_first`: small launches against torch's form, then the shapes that run against fp64."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.first_facts import Fact, compared
from benchmarks.gpu_shapes import dtype_of, has_fp8, models, noise, plan_of, toy
from lopa_dist.kernels.attention import attend_tiles
from lopa_dist.kernels.dispatch import KERNELS
from lopa_dist.kernels.preflight import VARIANTS, Widths, faults
from lopa_dist.kernels.quantized import fp8_linear, int8_linear, quantize_fp8, quantize_int8, quantize_rows
from lopa_dist.kernels.random import gumbel
from lopa_dist.kernels.record_head import filter_logits, record_head
from lopa_dist.kernels.rope import rope_and_store, rope_table
from lopa_dist.kernels.rows import add_rms_norm, swiglu
from lopa_dist.kernels.sampling import Sampling
from lopa_dist.kernels.segment_attention import Segments, attend_plain
from lopa_dist.kernels.tiles import Split
from lopa_dist.kernels.virtual_gemm import vgemm
from lopa_dist.models.config import ModelConfig
from lopa_dist.ragged import UNBOUNDED

BOUND = {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float32: 1e-5}  # most that an error's relative norm may be
FAST_BOUND = 1e-2  # the same with fast accumulation, which keeps fewer bits of partial sums
FAR = (1 << 31) + 4096  # numbers in a pool that is too large for 32-bit offsets
TIED = 0.05  # rounding may choose either of two tokens whose preferences differ by at most this
TRITON_FILES = (
    "meta_kernels", "rope_triton", "rows_triton", "record_head_triton", "filters_triton", "virtual_gemm_triton",
    "experts_triton",
)  # fmt: skip


def preflight(device: torch.device) -> Iterator[Fact]:
    """Yield the facts of one small launch of each kernel at the models' widths, and what the compiled kernels use."""
    if device.type == "cpu":
        yield "not on a CPU", dict
        return

    def check(kernel: str, sizes: Widths) -> dict[str, Any]:
        found = faults(sizes, torch.bfloat16, device, (kernel,))
        return {"ok": not found, "fault": str(found.get(kernel, ""))}

    for name, shape in models(device).items():
        for kernel, variant, sizes in tried(shape, dtype_of(device)):
            if kernel != "fp8" or has_fp8(device):
                yield f"{kernel}, {name}, {variant}", partial(check, kernel, sizes)
    yield "compiled", lambda: {"kernels": compiled()}


def tried(shape: ModelConfig, dtype: torch.dtype) -> Iterator[tuple[str, str, Widths]]:
    """Yield (kernel, name of the variant, widths) for each small launch at the widths of the model `shape`.

    All kernels run with tiles of three heights. Kernels that have other variants in other kinds of models also run in
    those variants.
    """
    group, kinds = shape.heads // shape.kv_heads, (dtype, torch.int8)
    hidden, intermediate, dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    sizes = Widths(hidden, intermediate, shape.heads, shape.kv_heads, dim, max(1, 64 // group), experts=kinds)
    for rows in sorted({max(1, height // group) for height in (16, 64, 128)}):
        for kernel in KERNELS:
            yield kernel, f"tiles of {rows}", sizes._replace(tile_rows=rows)
    for name, variant in VARIANTS.items():
        for kernel in variant.kernels:
            yield kernel, name, variant.of(sizes)


def compiled() -> list[dict[str, Any]]:
    """Return the registers, spills and shared memory of each variant that Triton has compiled in this process."""
    found = []
    for name in TRITON_FILES:
        for kernel in vars(importlib.import_module(f"lopa_dist.kernels.{name}")).values():
            caches: Mapping[int, Any] = getattr(kernel, "device_caches", {})
            for cache in caches.values():
                found += [used(kernel.fn.__name__, str(key), variant) for key, variant in cache[0].items()]
    return found


def used(name: str, key: str, variant: Any) -> dict[str, Any]:
    """Return what a compiled variant of the kernel `name` uses; a figure is None if this version of Triton lacks it."""
    metadata = getattr(variant, "metadata", None)
    return {
        "kernel": name, "registers": getattr(variant, "n_regs", None), "spills": getattr(variant, "n_spills", None),
        "shared": getattr(metadata, "shared", None), "warps": getattr(metadata, "num_warps", None), "of": key[:600],
    }  # fmt: skip


@dataclass(frozen=True)
class Case:
    """The rows of an attention call, and what they see."""

    rows: int
    prefix: int  # cached tokens that all rows see
    branches: int = 1
    split: bool = False  # whether tiles are split along their columns
    tail: int = 0  # cached tokens in a second range
    drafts: int = 0  # rows of each branch that verify drafts
    far: bool = False  # whether slots are beyond 32-bit offsets (on a GPU)
    dtype: torch.dtype | None = None  # None: the precision that is usually checked on the device

    def __str__(self) -> str:
        words = [f"{self.rows} rows, prefix {self.prefix}, {self.branches} branches"]
        words += [f"tail {self.tail}"] * bool(self.tail) + [f"{self.drafts} drafts"] * bool(self.drafts)
        words += [word for word, there in (("split", self.split), ("far", self.far)) if there]
        return ", ".join(words + [str(self.dtype)] * (self.dtype is not None))

    def segments(self, base: int, device: torch.device) -> Segments:
        """Return the branches' segments; their cached tokens begin at slot `base`, and their own rows follow.

        Every third column of the window is hidden from the rows that verify drafts, as if drafts replaced masks there.
        """
        each = self.rows // self.branches
        starts, same = np.arange(self.branches) * each, np.ones(self.branches, int)
        column = np.arange(each)
        draft = column >= each - self.drafts
        depth = np.tile(draft.astype(int), self.branches)
        until = np.where(~draft & (column % 3 == 0), 1, UNBOUNDED)
        hi = np.where(draft, column + 1, each - self.drafts)
        tail = (same * (base + self.prefix), same * self.tail) if self.tail else None
        return Segments(
            starts, each * same, same * base, self.prefix * same, base + self.prefix + self.tail + starts,
            np.tile(hi, self.branches), tail, None,
            (depth, torch.from_numpy(np.tile(until, self.branches)).to(device)) if self.drafts else None,
        )  # fmt: skip


def attention(device: torch.device, shape: ModelConfig, case: Case) -> dict[str, Any]:
    """Compare the attention of windows after one prefix with fp64; whatever no row sees is NaN."""
    heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
    slots, covered = case.prefix + case.tail + case.rows, case.rows // case.branches * case.branches
    q, keys, values = (noise(device, n, h, dim) for n, h in ((case.rows, heads), *2 * [(slots, kv_heads)]))
    if case.dtype is not None:
        q, keys, values = (x.to(case.dtype) for x in (q, keys, values))
    wanted = attend_plain(q.double(), keys.double(), values.double(), case.segments(0, device))
    q[covered:], keys[slots - case.rows + covered :], values[slots - case.rows + covered :] = 3 * [torch.nan]
    base = FAR // (kv_heads * dim) if case.far and device.type == "cuda" else 5
    pools = [x.new_full((base + slots, kv_heads, dim), torch.nan) for x in (keys, values)]
    for pool, cached in zip(pools, (keys, values), strict=True):
        pool[base:] = cached
    split = Split(8) if case.split else None
    plan = plan_of(case.segments(base, device), case.rows, shape, case.rows, split, device)
    found = attend_tiles(q, pools[0], pools[1], plan)
    return compared(found[:covered], wanted[:covered], BOUND[q.dtype]) | {"first slot": base}


RULES = {
    "neg_entropy": Sampling(),
    "probability": Sampling("probability"),
    "margin": Sampling("margin"),
    "noise": Sampling("probability", 0.8),
    "top-p": Sampling("probability", 0.8, top_p=0.9),
    "top-k": Sampling("probability", 0.8, top_k=20),
    "second choice": Sampling(),
}


def head(device: torch.device, shape: ModelConfig, rows: int, rule: str = "neg_entropy") -> dict[str, Any]:
    """Compare records with a softmax in fp64, in rows whose choices are not tied; the last three rows do not count."""
    hidden, weight = noise(device, rows, shape.hidden_size), noise(device, shape.vocab_size, shape.hidden_size)
    hidden *= 3 * shape.hidden_size**-0.5
    sampling, second = RULES[rule], rule == "second choice"
    keys = torch.arange(rows, device=device) * 977 if sampling.temperature else None
    real = rows - 3
    count = torch.tensor([real], dtype=torch.int32, device=device)
    spoilt = torch.where(torch.arange(rows, device=device)[:, None] < real, hidden, torch.nan)
    records = record_head(spoilt, weight, shape.mask_id, keys, sampling, rows=count, second_choices=second)[:real]
    logits = torch.cat([part.double() @ weight.double().T for part in hidden[:real].split(64)])
    logits[:, shape.mask_id] = -torch.inf
    logits /= sampling.temperature or 1
    if sampling.filtered:
        logits = filter_logits(logits, sampling.top_p, sampling.top_k)
    preferences = logits if keys is None else logits + gumbel(keys[:real], torch.arange(logits.shape[1], device=device))
    top = preferences.topk(3, 1)
    gaps = -top.values.diff(dim=1)
    clear = (gaps[:, 0] > TIED) & ((gaps[:, 1] > TIED) if second else True)
    share = logits.softmax(1)
    chosen = share.gather(1, top.indices[:, :1])[:, 0]
    wanted = [chosen, confidence(share, chosen, sampling.confidence)]
    tokens = [records[:, 0] == top.indices[:, 0]]
    if second:
        wanted.append(share.gather(1, top.indices[:, 1:2])[:, 0])
        tokens.append(records[:, 3] == top.indices[:, 1])
    found = records[:, [1, 2, 4] if second else [1, 2]].contiguous().view(torch.float32)
    equal = float(torch.stack(tokens)[:, clear].double().mean())
    exact = torch.stack(wanted, 1)[clear]
    size = exact.norm(dim=0)  # per column, because a confidence may be a hundred times as large as a probability
    result = compared(found[clear] / size, exact / size, 10 * BOUND[hidden.dtype])
    return result | {"ok": result["ok"] and equal == 1, "equal tokens": equal, "not tied": int(clear.sum())}


def confidence(share: Tensor, chosen: Tensor, rule: str) -> Tensor:
    """Return the confidence ``[R]`` by a rule; `share` ``[R, V]`` are probabilities, `chosen` ``[R]`` the choices'."""
    if rule == "probability":
        return chosen
    if rule == "neg_entropy":
        return (share * share.clamp(min=1e-300).log()).sum(1)
    best = share.topk(2, 1).values
    return best[:, 0] - best[:, 1]


def norm(device: torch.device, shape: ModelConfig, rows: int) -> dict[str, Any]:
    """Compare the norm of a residual sum with fp64."""
    x, residual, weight = (noise(device, *size, shape.hidden_size) for size in ((rows,), (rows,), ()))
    total = (x + residual).double()
    wanted = total * torch.rsqrt(total.square().mean(1, keepdim=True) + 1e-6) * weight.double()
    return compared(add_rms_norm(x, residual, weight, 1e-6)[0], wanted, BOUND[x.dtype])


def gate(device: torch.device, shape: ModelConfig, rows: int) -> dict[str, Any]:
    """Compare SwiGLU with fp64."""
    both = noise(device, rows, 2 * shape.intermediate_size)
    left, right = both.double().chunk(2, 1)
    wanted = left * left.sigmoid() * right
    return compared(swiglu(both), wanted, BOUND[both.dtype])


def rotation(device: torch.device, shape: ModelConfig, rows: int) -> dict[str, Any]:
    """Compare rotated keys with fp64, in the last slots of a pool too large for 32-bit offsets (on a GPU)."""
    heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
    slots = FAR // (kv_heads * dim) + rows if device.type == "cuda" else 3 * rows
    keys = torch.zeros(slots, kv_heads, dim, dtype=dtype_of(device), device=device)
    qkv = noise(device, rows, (heads + 2 * kv_heads) * dim)
    cos, sin = rope_table(torch.arange(rows, device=device) * 9, dim, shape.rope_theta, torch.float32)
    count = torch.tensor([rows], dtype=torch.int32, device=device)
    values = torch.zeros_like(keys)
    rope_and_store(qkv, cos, sin, keys, values, slots - rows, count)
    k = qkv.unflatten(1, (-1, dim))[:, heads : heads + kv_heads].double()
    (first, second), turn = k.chunk(2, -1), torch.complex(cos.double(), sin.double())[..., dim // 2 :]
    turned = torch.complex(first, second) * turn
    wanted = torch.cat([turned.real, turned.imag], -1)
    return compared(keys[slots - rows :], wanted, BOUND[keys.dtype]) | {"slots": slots}


def product(device: torch.device, shape: ModelConfig, rows: int, kind: str, down: bool) -> dict[str, Any]:
    """Compare the product of rows and a weight with fp64; the last row does not count.

    The weight is the projection to q, k and v, or the down projection. `kind` says which kernel multiplies.
    """
    sizes = (shape.heads + 2 * shape.kv_heads) * shape.head_dim, shape.hidden_size
    outputs, inputs = (shape.hidden_size, shape.intermediate_size) if down else sizes
    x, weight = noise(device, rows, inputs), noise(device, outputs, inputs) * inputs**-0.5
    count = torch.tensor([rows - 1], dtype=torch.int32, device=device)
    bound = BOUND[x.dtype]
    if kind.startswith("fp8"):
        eight, scale = quantize_fp8(weight)
        quantized = quantize_rows(x)
        fast = kind == "fp8 fast"
        found = fp8_linear(x, eight, scale, fast=fast)
        real, exact = quantized.eight.double() * quantized.scale[:, None], eight.double() * scale[:, None]
        bound = FAST_BOUND if fast else bound
    elif kind == "int8":
        eight, scale = quantize_int8(weight)
        found = int8_linear(x, eight, scale, rows=count)
        real, exact = x.double(), eight.double() * scale[:, None]
    else:
        found, real, exact = vgemm(x, weight, count), x.double(), weight.double()
    return compared(found[: rows - 1], (real @ exact.T)[: rows - 1], bound)


def kernels(device: torch.device, small: bool = False) -> Iterator[Fact]:
    """Yield the facts about all operations, at the shapes that run, or at `small` shapes, as on a CPU."""
    small = small or device.type == "cpu"
    kinds = ["vgemm", "int8", *(["fp8", "fp8 fast"] if has_fp8(device) else [])]
    for name, real in models(device).items():
        shape = toy(real) if small else real
        for rows in (24,) if small else (30, 64, 94, 520, 2048):
            for kernel in (norm, gate, rotation, head):
                if kernel is not head or rows <= 520:
                    yield f"{kernel.__name__}, {name}, {rows} rows", partial(kernel, device, shape, rows)
            for kind in kinds:
                for down in (False, True):
                    words = f"{kind}, {name}, {rows} rows{', down' if down else ''}"
                    yield words, partial(product, device, shape, rows, kind, down)
        for rule in list(RULES)[1:]:
            rows = 24 if small else 94
            yield f"head, {name}, {rows} rows, {rule}", partial(head, device, shape, rows, rule)
        for case in cases(small):
            yield f"attention, {name}, {case}", partial(attention, device, shape, case)


def cases(small: bool) -> list[Case]:
    """Return the cases on which attention is checked."""
    if small:
        few = [Case(24, 0), Case(24, 40, 3), Case(24, 300, 1, True), Case(25, 20, 3, tail=30, drafts=3)]
        return [*few, Case(24, 40, 2, far=True)]
    prefixes = (0, 1, 1023, 1024, 4096)
    chosen = [Case(rows, p, b, s) for rows in (64, 94, 520) for p in prefixes for b in (1, 8) for s in (False, True)]
    usual = Case(94, 1024)
    chosen += [replace(usual, dtype=torch.float16), replace(usual, drafts=16), replace(usual, tail=300, drafts=10)]
    chosen += [replace(usual, branches=8, tail=300, split=True), replace(usual, far=True)]
    return [*chosen, replace(usual, far=True, split=True, branches=8), Case(2048, 0), Case(2048, 1024)]
