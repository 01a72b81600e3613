"""One small launch of each Triton kernel, compared with torch's form of it, before a model runs on them.

A kernel may fail on a machine on which the tests never ran: Triton's launcher finds no C compiler, a compiler or driver
rejects the kernel, or it computes other numbers on this GPU. Found here, the fault costs that kernel its speed, but not
the job or its texts. The widths are the model's own, so the check covers the variant that runs.
"""

from __future__ import annotations

import logging
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lopa_dist.kernels import record_head, rope, rows, virtual_gemm
from lopa_dist.kernels.dispatch import KERNELS, TRITON, by_torch, hopper, on_device
from lopa_dist.kernels.experts import TALL, weighted_sum
from lopa_dist.kernels.meta_attention import MetaPlan, attend_meta
from lopa_dist.kernels.quantized import FP8, int8_linear, quantize_int8, quantize_rows_plain
from lopa_dist.kernels.routing import Router, routed
from lopa_dist.kernels.sampling import Sampling
from lopa_dist.kernels.segment_attention import Segments, attend_plain
from lopa_dist.kernels.tiles import Capacity, Split, tile
from lopa_dist.ragged import ROW_TILE

log = logging.getLogger("lopa_dist")

ROWS, REAL = 40, 37  # packed rows, and how many of them are real
CACHED = 300  # cached tokens that attention's rows see: enough to be split
VOCABULARY = 512
# largest difference allowed, relative to the largest number; a fault's is of the order of 1
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}
LEAST_ALIKE = 0.98  # least share of rows that must choose the same experts
WITHOUT_GRAPHS = {"attention", "rotation", "vgemm"}  # their torch forms wait for the number of real rows


class Widths(NamedTuple):
    """What a model's kernels are compiled for: its sizes, and the variants that its forwards run."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    tile_rows: int  # of attention
    bounded: bool = False  # rows see part of the cached tokens, and K/V go to chosen slots
    whole: bool = True  # as in `MetaPlan`; if False, tiles are not split either
    qk_norm: bool = False
    rope_fp32: bool = False
    experts: tuple[torch.dtype, ...] = ()  # dtypes of experts' weights that our kernel multiplies
    router: Router | None = None  # of a mixture of experts
    routed: int = 0  # number of its experts


class Fault(NamedTuple):
    """What is wrong with a kernel, and what to do about it."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}: {self.remedy}"


Comparison = tuple[Tensor, Tensor]  # a kernel's result, and torch's
Trial = Callable[[Widths, torch.dtype, torch.device], Iterator[Comparison]]


@cache
def refused(
    widths: Widths, dtype: torch.dtype, device: torch.device, wanted: tuple[str, ...] = KERNELS
) -> frozenset[str]:
    """Return which of the `wanted` kernels must run in torch's form; the first call checks them, and warns.

    Raises:
        RuntimeError: as in `faults`.
    """
    log.info("checking %d Triton kernels on this GPU; the first time, compiling them takes up to a minute", len(wanted))
    by_kernel = faults(widths, dtype, device, wanted)
    for fault in dict.fromkeys(by_kernel.values()):
        names = ", ".join(name for name in by_kernel if by_kernel[name] == fault)
        log.warning("WARNING: slower without Triton: %s. %s", names, fault)
    return frozenset(by_kernel)


def faults(
    widths: Widths, dtype: torch.dtype, device: torch.device, wanted: tuple[str, ...] = KERNELS
) -> dict[str, Fault]:
    """Launch kernels once, compare them with torch, and return their faults.

    Args:
        widths: the model's, on this rank.
        dtype: of its activations.
        device: a GPU, or a CPU on which Triton interprets.
        wanted: names of `KERNELS`.

    Returns:
        A fault for each kernel that has one.

    Raises:
        RuntimeError: a kernel left the GPU in a state in which nothing runs any more.
    """
    if not TRITON:
        return dict.fromkeys(wanted, Fault("Triton is not installed", "pip install triton"))
    by_kernel: dict[str, Fault] = {}
    report = "please report it, with the GPU's name and the versions of torch and Triton"
    for name in wanted:
        try:
            if wrong := difference(TRIALS[name], widths, dtype, device):
                by_kernel[name] = Fault(wrong, report)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            log.debug("the kernel %s failed", name, exc_info=True)
            check_alive(name, device, error)
            by_kernel[name] = explained(error)
    return by_kernel


@torch.inference_mode()
def difference(trial: Trial, widths: Widths, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return where a kernel's result differs from torch's, with both numbers; None if it does not."""
    with on_device(device):
        for number, (result, expected) in enumerate(trial(widths, dtype, device)):
            exact = not expected.is_floating_point()  # such as tokens: in the trials, every row has a clear choice
            result, expected = result.double(), expected.double()
            apart = (result - expected).abs().nan_to_num(torch.inf)
            allowed = 0.0 if exact else TOLERANCE[dtype] * expected.abs().max()
            if bool((apart <= allowed).all()):
                continue
            worst = np.unravel_index(int(apart.argmax()), apart.shape)
            numbers = f"{result[worst].item():.4g} where torch has {expected[worst].item():.4g}"
            share = (apart > allowed).double().mean().item()
            return f"wrong numbers (result {number}, at {[int(i) for i in worst]}: {numbers}; {share:.1%} are wrong)"
    return None


def check_alive(name: str, device: torch.device, error: Exception) -> None:
    """Raise a RuntimeError if nothing runs on the GPU any more after `error`: the process cannot recover from that."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        raise RuntimeError(
            f"Triton's kernel {name} made the GPU unusable for this process ({brief(error)}): start again with "
            "engine.kernels=torch, and please report it"
        ) from error


def compiler() -> str | None:
    """Return the C compiler that Triton runs, the one that `CC` names if it is set; None: it is not there."""
    chosen = os.environ.get("CC")
    return shutil.which(chosen or "gcc") or (None if chosen else shutil.which("clang"))


def explained(error: Exception) -> Fault:
    """Return the cause of an error in compiling or launching, and its remedy."""
    chosen = os.environ.get("CC")
    if compiler() is None:
        what = f"CC={chosen} is not there" if chosen else "there is no C compiler, which Triton needs to run"
        return Fault(what, "install gcc (apt install gcc, dnf install gcc, module load gcc), or let CC name one")
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").exists():
        version = sysconfig.get_python_version()
        return Fault(
            f"{headers / 'Python.h'} is missing, which Triton needs to run",
            f"install Python's headers (apt install python{version}-dev, dnf install python3-devel), or use a Python "
            "that brings them (uv, conda)",
        )
    return Fault(brief(error), "if it fails at a second start, please report it; engine.kernels=torch runs without it")


def brief(error: Exception) -> str:
    """Return an error's type with the first and last lines of its message; Triton's messages begin with a location."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    ends = lines if len(lines) < 3 else [lines[0], lines[-1]]
    return f"{type(error).__name__}: {' / '.join(ends)}"[:400]


def normal(*shape: int, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return normally distributed numbers, the same on all devices."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def count(device: torch.device) -> Tensor:
    """Return the number of real rows as a tensor, as kernels read it."""
    return torch.tensor([REAL], dtype=torch.int32, device=device)


def attention(widths: Widths, dtype: torch.dtype, device: torch.device) -> Iterator[Comparison]:
    """Compare two segments that see the same cached tokens, in two ranges: unsplit and, if `whole`, split and merged.

    The segments are branches or, where rows are bounded, a chain whose tokens are cached already, and a group of masks.
    """
    heads, kv_heads, dim = widths.heads, widths.kv_heads, widths.head_dim
    starts, counts = np.array([0, REAL // 2]), np.array([REAL // 2, REAL - REAL // 2])
    number = np.concatenate([np.arange(n) for n in counts])
    hi, seen = number + 1, None
    if widths.bounded:
        in_chain = np.arange(REAL) < counts[0]
        hi, seen = hi * ~in_chain, np.where(in_chain, CACHED - counts[0] + number + 1, CACHED)
    first = CACHED // 3 * np.ones(2, int)
    tail = (first + 9, CACHED - first)
    segments = Segments(starts, counts, np.full(2, 5), first, CACHED + 9 + starts, hi, tail, seen)
    q = normal(ROWS, heads, dim, seed=1, dtype=dtype, device=device)
    slots = CACHED + 9 + ROWS
    keys, values = (normal(slots, kv_heads, dim, seed=s, dtype=dtype, device=device) for s in (2, 3))
    expected = attend_plain(q.float(), keys.float(), values.float(), segments)[:REAL]
    split_each = Split(4 * -(-REAL // widths.tile_rows))  # a stack's tiles share its parts
    for split in (None, split_each) if widths.whole else (None,):
        tiles = tile(segments, widths.tile_rows, split, stacked=widths.whole)
        capacity = Capacity(len(tiles.table), len(tiles.merges), tiles.parts)
        plan = MetaPlan(
            ROWS, capacity, heads, kv_heads, dim, widths.tile_rows, CACHED + 9, device,
            bounded=widths.bounded, whole=widths.whole,
        )  # fmt: skip
        plan.fill(tiles)
        yield attend_meta(q, keys, values, plan)[:REAL], expected


def rotation(widths: Widths, dtype: torch.dtype, device: torch.device) -> Iterator[Comparison]:
    """Compare the rotated q and the stored K and V: in the slots that the model uses; in fp16, without infinities."""
    from lopa_dist.kernels import rope_triton

    heads, kv_heads, dim = widths.heads, widths.kv_heads, widths.head_dim
    qkv = normal(ROWS, (heads + 2 * kv_heads) * dim, seed=4, dtype=dtype, device=device)
    angles = torch.float32 if widths.rope_fp32 else dtype
    cos, sin = rope.rope_table(torch.arange(ROWS, device=device) * 7, dim, 1e4, angles)
    norms = slots = must_be_finite = None
    if widths.qk_norm:
        norms = normal(dim, seed=18, dtype=dtype, device=device), normal(dim, seed=19, dtype=dtype, device=device)
    if widths.bounded:
        slots = (torch.arange(ROWS, device=device) * 3) % (ROWS + 3)
    if dtype == torch.float16:
        must_be_finite = torch.arange(ROWS, device=device) % 2 == 0
        qkv[::4, heads * dim :] = torch.inf  # K and V of half of these rows
    triton, plain = (
        [torch.zeros(ROWS + 3, kv_heads, dim, dtype=dtype, device=device) for _ in range(2)] for _ in range(2)
    )
    real = count(device)
    result = rope_triton.rope_and_store(
        qkv, cos.flatten(1), sin.flatten(1), triton[0], triton[1], 3, real, norms, 1e-6, must_be_finite, slots
    )
    with by_torch(frozenset({"rotation"})):
        expected = rope.rope_and_store(qkv, cos, sin, plain[0], plain[1], 3, real, norms, 1e-6, must_be_finite, slots)
    yield from zip([result[:REAL], *triton], [expected[:REAL], *plain], strict=True)


def norm(widths: Widths, dtype: torch.dtype, device: torch.device) -> Iterator[Comparison]:
    """Compare a norm after a residual sum, with that sum, and a norm after an embedding."""
    from lopa_dist.kernels import rows_triton

    x, residual = (normal(ROWS, widths.hidden, seed=s, dtype=dtype, device=device) for s in (5, 6))
    weight = normal(widths.hidden, seed=7, dtype=dtype, device=device)
    with by_torch(frozenset({"norm"})):
        expected = rows.add_rms_norm(x.clone(), residual, weight, 1e-6)
        tokens = torch.arange(ROWS, device=device) * 5 % ROWS
        embedded = rows.embed_rms_norm(tokens, x, weight, 1e-6)
    yield from zip(rows_triton.add_rms_norm(x, residual, weight, 1e-6), expected, strict=True)
    yield from zip(rows_triton.embed_rms_norm(tokens, x, weight, 1e-6), embedded, strict=True)


def swiglu(widths: Widths, dtype: torch.dtype, device: torch.device) -> Iterator[Comparison]:
    """Compare SwiGLU's gate; torch's form overwrites its argument."""
    from lopa_dist.kernels import rows_triton

    gate_up = normal(ROWS, 2 * widths.intermediate, seed=8, dtype=dtype, device=device)
    result = rows_triton.swiglu(gate_up)
    with by_torch(frozenset({"swiglu"})):
        yield result, rows.swiglu(gate_up)


def head(widths: Widths, dtype: torch.dtype, device: torch.device) -> Iterator[Comparison]:
    """Compare records of rows with a clear choice: without noise, with it, and with filters."""
    weight = normal(VOCABULARY, widths.hidden, seed=9, dtype=dtype, device=device)
    hidden = weight[torch.arange(ROWS, device=device) * 11] * (12 / widths.hidden)
    keys = torch.arange(ROWS, device=device) * 977
    for sampling in (Sampling(), Sampling(temperature=0.5), Sampling(temperature=3.0, top_p=0.9, top_k=20)):
        given = (hidden, weight, VOCABULARY - 1, keys if sampling.temperature else None, sampling)
        result = record_head.fused_records(*given, rows=count(device))[:REAL]
        with by_torch(frozenset({"head"})):
            expected = record_head.record_head(*given)[:REAL]
        yield result[:, 0], expected[:, 0]
        yield result[:, 1:].contiguous().view(torch.float32), expected[:, 1:].contiguous().view(torch.float32)


def vgemm(widths: Widths, dtype: torch.dtype, device: torch.device) -> Iterator[Comparison]:
    """Compare a product with weights in the activations' precision, and one with int8 weights."""
    from lopa_dist.kernels import virtual_gemm_triton

    x = normal(ROWS, widths.hidden, seed=10, dtype=dtype, device=device)
    weight = normal(2 * widths.kv_heads * widths.head_dim, widths.hidden, seed=11, dtype=dtype, device=device)
    for stored, scale in ((weight, None), quantize_int8(weight)):
        result = virtual_gemm_triton.vgemm(x, stored, count(device), None, scale)
        with by_torch(frozenset({"vgemm"})):
            expected = virtual_gemm.vgemm(x, stored, count(device), None, scale)
        yield result[:REAL], expected[:REAL]


def experts(widths: Widths, dtype: torch.dtype, device: torch.device) -> Iterator[Comparison]:
    """Compare routing, weighted sums, and products in short and in tall tiles, with weights as they are stored."""
    from lopa_dist.kernels import experts_triton, routing_triton

    router, number = widths.router or Router(2, True), widths.routed or 4
    sizes = (ROWS, 8 * ROWS) if routing_triton.takes(router, number) else ()  # for blocks of both sizes
    for size in sizes:
        bias = normal(number, seed=20, dtype=torch.float32, device=device) / 8 if router.sigmoid else None
        order = torch.rand(size, number, generator=torch.Generator().manual_seed(size)).argsort(1).to(device)
        logits = (order / 32 - number / 64).to(torch.float32 if router.sigmoid else dtype)  # exact, and all different
        weights, groups = routing_triton.routed(logits, bias, router, ROW_TILE)
        with by_torch(frozenset({"experts"})):
            expected, places = routed(logits, bias, router, ROW_TILE)
        same = (groups.experts() == places.experts()).all(1)  # with a bias, two experts may be nearly tied
        yield (same.double().mean() >= LEAST_ALIKE).int()[None], torch.ones(1, device=device)
        yield weights[same], expected[same]
        yield groups.choice[groups.place.flatten()], torch.arange(groups.place.numel(), device=device)
        if size == ROWS:
            some = 1  # over fixed buffers, where the other rows are padding
            real = torch.tensor([some], dtype=torch.int32, device=device)
            found = [
                torch.cat([made.ends, made.place[:some].flatten()])
                for _, made in (
                    routing_triton.routed(logits, bias, router, ROW_TILE, real),
                    routing_triton.routed(logits[:some], bias, router, ROW_TILE),
                )
            ]
            yield found[0], found[1]
        x = normal(len(groups.choice), widths.hidden, seed=21, dtype=dtype, device=device)
        result = experts_triton.weighted_sum(x, groups.place, weights)
        with by_torch(frozenset({"experts"})):
            yield result, weighted_sum(x, groups, weights)
    weight = normal(3 * 2 * widths.head_dim, widths.hidden, seed=14, dtype=dtype, device=device)
    for height in (ROW_TILE, TALL):
        x = normal(4 * height, widths.hidden, seed=13, dtype=dtype, device=device)
        ends = torch.tensor([height, height, 3 * height], dtype=torch.int32, device=device)
        for kind in widths.experts:
            stored, scale = quantize_int8(weight) if kind == torch.int8 else (weight, None)
            of_experts = stored.unflatten(0, (3, -1))
            scales = None if scale is None else scale.unflatten(0, (3, -1))
            result = experts_triton.expert_linear(x, of_experts, scales, ends, height)
            for expert, group in ((0, slice(0, height)), (2, slice(height, 3 * height))):
                with by_torch(frozenset({"vgemm"})):
                    if scales is None:
                        yield result[group], x[group] @ of_experts[expert].T
                    else:
                        yield result[group], int8_linear(x[group], of_experts[expert], scales[expert])


def fp8(widths: Widths, dtype: torch.dtype, device: torch.device) -> Iterator[Comparison]:
    """Compare rows in fp8, of given numbers and of the results of a norm and of SwiGLU, and products of a few rows."""
    from lopa_dist.kernels import rows_triton, virtual_gemm_triton

    # the interpreter truncates where it should round to fp8
    cast = FP8 if device.type == "cuda" else torch.float32
    x, residual = (normal(ROWS, widths.hidden, seed=seed, dtype=dtype, device=device) for seed in (12, 15))
    weight = normal(widths.hidden, seed=16, dtype=dtype, device=device)
    gate_up = normal(ROWS, 2 * widths.intermediate, seed=17, dtype=dtype, device=device)
    yield from eight_bits(rows_triton.quantize_rows(x, cast), x)
    *normed, _ = rows_triton.add_rms_norm_fp8(x, residual, weight, 1e-6, cast)
    yield from eight_bits(normed, rows_triton.add_rms_norm(x, residual, weight, 1e-6)[0])
    yield from eight_bits(rows_triton.swiglu_fp8(gate_up, cast), rows_triton.swiglu(gate_up))
    if hopper(device):
        (rows, of_rows), (columns, of_columns) = (quantize_rows_plain(given) for given in (x, residual))
        product = virtual_gemm_triton.vgemm(
            rows,
            columns,
            count(device),
            None,
            of_columns,
            out=torch.empty(ROWS, ROWS, device=device),
            row_scale=of_rows,
        )
        yield product[:REAL], ((rows.float() * of_rows[:, None]) @ (columns.float() * of_columns[:, None]).T)[:REAL]


def eight_bits(result: Sequence[Tensor], x: Tensor) -> Iterator[Comparison]:
    """Compare scales with torch's, and the numbers of both with `x`: rounded either way, fp8 is at most 1/16 off."""
    exact, expected = x.double(), quantize_rows_plain(x)
    yield result[1], expected[1]
    for eight, scale in ((result[0].to(FP8), result[1]), expected):
        off = (eight.double() * scale[:, None] - exact).abs() / (exact.abs() / 16 + scale[:, None] / 512)
        yield (off > 1.01).double() + 1, torch.ones_like(off)


TRIALS: dict[str, Trial] = dict(
    zip(KERNELS, (attention, rotation, norm, swiglu, head, vgemm, experts, fp8), strict=True)
)


class Variant(NamedTuple):
    """A variant of some kernels, which other models run."""

    changes: dict[str, Any]  # fields of `Widths` to replace
    kernels: tuple[str, ...]  # the kernels that then differ

    def of(self, widths: Widths) -> Widths:
        """Return the widths that the variant is compiled for, at the sizes of `widths`."""
        return widths._replace(**self.changes)


VARIANTS = {
    "causal": Variant({"bounded": True, "qk_norm": True, "rope_fp32": True}, ("attention", "rotation")),
    "causal, reproducible": Variant({"bounded": True, "whole": False}, ("attention",)),
    "reproducible": Variant({"whole": False}, ("attention",)),
    "rotation in fp32": Variant({"rope_fp32": True}, ("rotation",)),
    "sigmoids": Variant(
        {"router": Router(5, True, sigmoid=True, scale=2.5, groups=8, chosen_groups=4), "routed": 32, "experts": ()},
        ("experts",),
    ),
    "softmax": Variant({"router": Router(3, True), "routed": 12, "experts": ()}, ("experts",)),
}
"""What tests and `benchmarks.gpu_first` try besides a masked model's kernels: every variant that some model runs."""
