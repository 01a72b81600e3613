"""Residual norm, rotation with K/V store and SwiGLU: the Triton forms against torch's operators.

Without a GPU the kernels are interpreted, and cross-compiled.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lopa_dist.kernels.dispatch import fused
from lopa_dist.kernels.rope import rope_and_store, rope_table
from lopa_dist.kernels.rows import add_rms_norm, embed_rms_norm, swiglu
from tests.kernels.cross_compile import Variant, compile_all
from tests.kernels.forms import plain

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SLOTS, SCRATCH = 90, 13


def close(found: Tensor, wanted: Tensor) -> bool:
    """Equal up to a few roundings; the interpreter cuts bf16 off where a GPU rounds it."""
    steps = 2 if found.dtype == torch.float16 else 8
    step = torch.finfo(found.dtype).eps
    return torch.allclose(found.float(), wanted.float(), rtol=steps * step, atol=steps * step)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def real(count: int) -> Tensor:
    return torch.tensor([count], dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 192), (17, 48), (64, 200)])
def test_residual_norm(dtype: torch.dtype, rows: int, size: int) -> None:
    from lopa_dist.kernels import rows_triton

    x, residual = random(rows, size, dtype=dtype), random(rows, size, dtype=dtype, seed=1)
    weight = random(size, dtype=dtype, seed=2)
    normed, total = rows_triton.add_rms_norm(x, residual, weight, 1e-5)
    wanted, summed = plain(add_rms_norm, x.clone(), residual, weight, 1e-5)
    assert close(normed, wanted)
    assert close(total, summed)
    if dtype != torch.bfloat16:
        assert torch.equal(total, summed)
    x[1:] = torch.nan  # of pad rows
    assert torch.equal(rows_triton.add_rms_norm(x, residual, weight, 1e-5)[0][0], normed[0])


def test_the_sum_is_rounded_before_it_is_normalised() -> None:
    from lopa_dist.kernels import rows_triton

    x, residual = random(4, 64, dtype=torch.float16) * 30, random(4, 64, dtype=torch.float16, seed=1) * 0.01
    weight = torch.ones(64, dtype=torch.float16, device=DEVICE)
    normed, _ = rows_triton.add_rms_norm(x, residual, weight, 1e-6)
    assert (normed == plain(add_rms_norm, x.clone(), residual, weight, 1e-6)[0]).float().mean() > 0.99
    unrounded = x.float() + residual.float()
    unrounded = (unrounded * torch.rsqrt(unrounded.square().mean(1, keepdim=True) + 1e-6)).half()
    assert (normed != unrounded).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 192), (17, 48)])
def test_embedding_and_norm(dtype: torch.dtype, rows: int, size: int) -> None:
    from lopa_dist.kernels import rows_triton

    embedding, weight = random(30, size, dtype=dtype), random(size, dtype=dtype, seed=2)
    tokens = torch.arange(rows, device=DEVICE) * 7 % 30
    normed, embedded = rows_triton.embed_rms_norm(tokens, embedding, weight, 1e-5)
    wanted, looked_up = plain(embed_rms_norm, tokens, embedding, weight, 1e-5)
    assert close(normed, wanted)
    assert torch.equal(embedded, looked_up)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 48), (17, 3000), (64, 24)])
def test_swiglu(dtype: torch.dtype, rows: int, size: int) -> None:
    from lopa_dist.kernels import rows_triton

    gate_up = random(rows, 2 * size, dtype=dtype) * 4
    assert close(rows_triton.swiglu(gate_up), plain(swiglu, gate_up))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "norm", "rows", "count"),
    [((48, 4, 2), False, 17, 9), ((128, 7, 1), True, 17, 16), ((128, 4, 4), True, 1, 1), ((2, 1, 1), False, 3, 0)],
    ids=str,
)
@pytest.mark.parametrize("wide", [False, True])
def test_rotation_and_store(
    dtype: torch.dtype, heads: tuple[int, int, int], norm: bool, rows: int, count: int, wide: bool
) -> None:
    from lopa_dist.kernels import rope_triton

    dim, q_heads, kv_heads = heads
    qkv = random(rows, (q_heads + 2 * kv_heads) * dim, dtype=dtype)
    qkv[count:] = torch.nan
    cos, sin = rope_table(torch.arange(rows, device=DEVICE) * 7, dim, 1e4, torch.float32 if wide else dtype)
    norms = (random(dim, dtype=dtype, seed=1), random(dim, dtype=dtype, seed=2)) if norm else None
    pools = [torch.full((SLOTS, kv_heads, dim), torch.nan, dtype=dtype, device=DEVICE) for _ in range(4)]
    written = slice(SCRATCH, SCRATCH + count)
    for table in ((cos, sin), (cos[..., : dim // 2], sin[..., : dim // 2])):
        tables = tuple(x.flatten(1) for x in table)
        q = rope_triton.rope_and_store(qkv, *tables, *pools[:2], SCRATCH, real(count), norms, 1e-6)
        wanted = plain(rope_and_store, qkv, cos, sin, *pools[2:], SCRATCH, real(count), norms, 1e-6)
        assert q.shape == wanted.shape == (rows, q_heads, dim)
        assert close(q[:count], wanted[:count])
        for found, right in zip(pools[:2], pools[2:], strict=True):
            assert close(found[written], right[written])
            assert found.isnan().flatten(1).all(1).sum() == SLOTS - count  # no other slot was touched


def test_values_are_stored_as_they_are() -> None:
    from lopa_dist.kernels import rope_triton

    qkv = random(5, 4 * 8, dtype=torch.bfloat16)
    cos, sin = (x.flatten(1) for x in rope_table(torch.arange(5, device=DEVICE), 8, 1e4, torch.bfloat16))
    keys, values = (torch.zeros(9, 1, 8, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    rope_triton.rope_and_store(qkv, cos, sin, keys, values, 4, real(5), None, 1e-6)
    assert torch.equal(values[4:, 0], qkv[:, 24:])


def test_rows_may_go_where_they_are_told() -> None:
    from lopa_dist.kernels import rope_triton

    qkv = random(5, 4 * 8, dtype=torch.bfloat16)
    cos, sin = rope_table(torch.arange(5, device=DEVICE), 8, 1e4, torch.bfloat16)
    slots = torch.tensor([7, 0, 3, 8, 5], device=DEVICE)
    for name in ("triton", "plain"):
        keys, values = (torch.zeros(9, 1, 8, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
        tables = (cos.flatten(1), sin.flatten(1)) if name == "triton" else (cos, sin)
        store = rope_triton.rope_and_store if name == "triton" else rope_and_store
        store(qkv, *tables, keys, values, 4, real(4 if name == "triton" else 5), None, 1e-6, None, slots)
        assert torch.equal(values[slots[:4], 0], qkv[:4, 24:])
        assert torch.equal(keys[0].bool(), torch.ones_like(keys[0]).bool())
        assert not values[[1, 2, 4, 6]].any()


@pytest.mark.parametrize("norm", [False, True])
def test_drafts_that_overflow_are_stored_as_zeros(norm: bool) -> None:
    """Of rows of drafts, what is no finite number; a window's row keeps it, for its request must end as an error."""
    from lopa_dist.kernels import rope_triton

    rows, dim = 6, 8
    drafts = torch.tensor([True, False, True, True, False, True], device=DEVICE)
    qkv = random(rows, 4 * dim, dtype=torch.float16)
    qkv[:2, 16:], qkv[2, 16:18], qkv[3, 26] = torch.nan, torch.inf, -torch.inf
    qkv[4, 16:24] = 6e4  # its rotation overflows
    qkv[5, 16:24] = 6e4
    cos, sin = rope_table(torch.arange(rows, device=DEVICE) * 7 + 1, dim, 1e4, torch.float32)
    norms = (torch.ones(dim, dtype=torch.float16, device=DEVICE),) * 2 if norm else None
    stores = {None: rope_triton.rope_and_store, "plain": rope_and_store}
    found = {}
    for name, store in stores.items():
        tables = (cos, sin) if name else (cos.flatten(1), sin.flatten(1))
        for given_drafts in (None, drafts):
            pools = torch.zeros(2, rows, 1, dim, dtype=torch.float16, device=DEVICE)
            arguments = (qkv, *tables, *pools, 0, real(rows), norms, 1e-6, given_drafts)
            plain(store, *arguments) if name else store(*arguments)
            found[name, given_drafts is not None] = pools
    for cleared in (False, True):
        kernel, wanted = found[None, cleared], found["plain", cleared]
        assert torch.allclose(kernel.float(), wanted.float(), atol=1e-2, rtol=1e-2, equal_nan=True)
    kept, cleared = found["plain", False], found["plain", True]
    assert not kept[:, drafts].isfinite().all()
    assert cleared[:, drafts].isfinite().all()
    assert torch.equal(cleared[:, drafts], kept[:, drafts].nan_to_num(0, 0, 0))
    assert torch.equal(cleared[:, ~drafts].nan_to_num(7, 8, 9), kept[:, ~drafts].nan_to_num(7, 8, 9))


def test_plain_forms_serve_where_there_is_no_gpu() -> None:
    x, weight = torch.randn(3, 16), torch.ones(16)
    assert not fused(x, "norm")
    normed, total = add_rms_norm(x.clone(), x, weight, 1e-6)
    assert torch.equal(total, 2 * x)
    assert torch.equal(normed, plain(add_rms_norm, x.clone(), x, weight, 1e-6)[0])
    assert torch.equal(swiglu(x.clone()), plain(swiglu, x.clone()))
    keys, values = torch.zeros(5, 1, 4), torch.zeros(5, 1, 4)
    cos, sin = rope_table(torch.arange(3), 4, 1e4, torch.float32)
    q = rope_and_store(x, cos, sin, keys, values, 1, torch.tensor([2], dtype=torch.int32))
    assert q.shape == (3, 2, 4)
    assert torch.equal(values[1:3, 0], x[:2, 12:])
    assert not keys[3:].any()


def variants(arch: int) -> list[Variant]:
    """7B shapes: hidden 3584 and 4096, feed-forward 18944 and 12288, 28 heads of 4 and 32 of 32."""
    found = []
    for size in (3584, 4096):
        names = ("x", "residual", "weight", "normed", "total")
        types = dict.fromkeys(names, "*bf16") | {"eps": "fp32"}
        sizes = {"SIZE": size, "BLOCK": 4096}
        kernel = "lopa_dist.kernels.rows_triton:add_rms_norm_kernel"
        found.append(Variant(kernel, types, sizes, names, arch, {"num_warps": 8}))
        names = ("tokens", "embedding", "weight", "normed", "embedded")
        types = dict.fromkeys(names, "*bf16") | {"tokens": "*i64", "eps": "fp32"}
        kernel = "lopa_dist.kernels.rows_triton:embed_rms_norm_kernel"
        found.append(Variant(kernel, types, sizes, names, arch, {"num_warps": 8}))
    for size in (18944, 12288):
        names = ("gate_up", "out")
        kernel = "lopa_dist.kernels.rows_triton:swiglu_kernel"
        sizes = {"SIZE": size, "BLOCK": 2048}
        found.append(Variant(kernel, dict.fromkeys(names, "*bf16"), sizes, names, arch, {"num_warps": 4}))
    for heads, kv_heads, norm in ((28, 4, False), (32, 32, True)):
        names = ("qkv", "cos", "sin", "q_norm", "k_norm", "q", "keys", "values", "rows", "must_be_finite", "slots")
        strides = ("qkv_stride", "cos_stride", "sin_stride", "keys_stride", "values_stride")
        types = {**dict.fromkeys(names, "*bf16"), **dict.fromkeys(strides, "i32")}
        types |= {"rows": "*i32", "must_be_finite": "*i1", "slots": "*i64", "scratch": "i32", "eps": "fp32"}
        for clears in (False, True):
            sizes = {"H": heads, "KV": kv_heads, "D": 128, "HALF": 64, "HEADS": 16}
            sizes |= {"NORM": norm, "CLEARS": clears, "SLOTS": clears}
            kernel = "lopa_dist.kernels.rope_triton:rope_and_store_kernel"
            number = "*fp16" if clears else "*bf16"
            of_kind = {name: number if kind == "*bf16" else kind for name, kind in types.items()}
            found.append(Variant(kernel, of_kind, sizes, names + strides, arch, {"num_warps": 4}))
    return found


@pytest.mark.no_gpu
@pytest.mark.parametrize("arch", [80, 89, 90])
def test_cross_compiled(arch: int) -> None:
    """Loads and stores of 16 bytes a thread, no spills, registers for full occupancy or nearly so."""
    for one, kernel in zip(variants(arch), compile_all(variants(arch)), strict=True):
        print(one.arch, one.kernel, kernel.registers, kernel.stack, kernel.shared)
        assert kernel.stack == 0, one
        assert kernel.registers <= 64, one
        assert "ld.global.v4" in kernel.ptx, one
        assert "st.global.v4" in kernel.ptx, one
