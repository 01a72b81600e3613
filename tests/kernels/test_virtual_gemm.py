"""Linear layers that read their number of rows from the device: right, blind to pad rows, the same bits for any number.

Without a GPU the kernel is interpreted, and cross-compiled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lopa_dist.kernels import virtual_gemm_triton
from lopa_dist.kernels.quantized import quantize_int8, quantize_rows_plain
from lopa_dist.kernels.virtual_gemm import vgemm
from lopa_dist.kernels.virtual_gemm_triton import (
    FP32,
    HALF,
    HOPPER,
    HOPPER_FP8,
    HOPPER_INT8,
    INT8,
    GemmTile,
    config,
    fitting,
)
from tests.kernels.cross_compile import SHARED_LIMIT, Variant, compile_all
from tests.kernels.forms import plain

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SENTINEL = 7.0
SMALL = GemmTile(16, 32, 32, 4, 2, swap=False)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def real(count: int) -> Tensor:
    return torch.tensor([count], dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("eight", [False, True])
@pytest.mark.parametrize(
    ("dtype", "rows", "count", "wide", "deep"),
    [
        (torch.float32, 1, 1, 70, 96),
        (torch.float32, 64, 17, 130, 50),
        (torch.float16, 140, 129, 300, 128),
        (torch.bfloat16, 17, 16, 48, 72),
        (torch.float16, 9, 0, 48, 64),
    ],
    ids=str,
)
def test_against_the_plain_product(
    dtype: torch.dtype, rows: int, count: int, wide: int, deep: int, eight: bool, bias: bool
) -> None:
    if eight and dtype == torch.bfloat16 and DEVICE.type == "cpu":
        pytest.skip("the interpreter makes no bf16 of int8")
    x, weight = random(rows, deep, dtype=dtype), random(wide, deep, dtype=dtype, seed=1)
    added = random(wide, dtype=dtype, seed=2) if bias else None
    weight, scale = quantize_int8(weight) if eight else (weight, None)
    x[count:] = torch.nan
    out = torch.full((rows, wide), SENTINEL, dtype=dtype, device=DEVICE)
    virtual_gemm_triton.vgemm(x, weight, real(count), added, scale, out=out)
    wanted = plain(vgemm, x, weight, real(count), added, scale)
    steps = 8 * torch.finfo(dtype).eps
    assert torch.allclose(out[:count].float(), wanted[:count].float(), rtol=steps, atol=steps * deep**0.5)
    assert out[count:].eq(SENTINEL).all()


@pytest.mark.parametrize("eight", [False, True])
def test_bits_do_not_depend_on_the_number_of_rows_or_programs(eight: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = random(90, 100), random(70, 100, seed=1)
    weight, scale = quantize_int8(weight) if eight else (weight, None)
    whole = virtual_gemm_triton.vgemm(x, weight, real(90), None, scale, SMALL)
    for count in (1, 16, 33, 90):
        part = virtual_gemm_triton.vgemm(x, weight, real(count), None, scale, SMALL)
        assert torch.equal(part[:count], whole[:count])
    for low in (3, 16, 40):  # wherever a row lies
        part = virtual_gemm_triton.vgemm(x[low : low + 20], weight, real(20), None, scale, SMALL)
        assert torch.equal(part, whole[low : low + 20])
    for programs in (1, 7, 1000):
        monkeypatch.setattr(virtual_gemm_triton, "processors", lambda device, programs=programs: programs)
        assert torch.equal(virtual_gemm_triton.vgemm(x, weight, real(90), None, scale, SMALL), whole)


def tiles_of(kind: Mapping[int, Sequence[GemmTile]]) -> tuple[GemmTile, ...]:
    return tuple(tile for tiles in kind.values() for tile in tiles)


EIGHT = (*tiles_of(HOPPER_INT8), *INT8)
KINDS = {"half": (*tiles_of(HOPPER), *HALF), "int8": EIGHT, "fp32": FP32}


@pytest.mark.parametrize("tiles", KINDS.values(), ids=KINDS)
def test_bits_do_not_depend_on_the_sizes_of_tiles(tiles: tuple[GemmTile, ...]) -> None:
    """Nor on which operand is left. The interpreter adds up step by step: there, steps must have one length."""
    dtype = torch.float32 if tiles is FP32 else torch.float16
    x, weight = random(140, 200, dtype=dtype), random(300, 200, dtype=dtype, seed=1)
    weight, scale = quantize_int8(weight) if tiles is EIGHT else (weight, None)
    for table in (HALF, INT8, FP32):  # from wide to narrow
        assert len({tile.bk for tile in table}) == 1
        assert [tile.bn for tile in table] == sorted({tile.bn for tile in table}, reverse=True)
    if DEVICE.type == "cpu":
        tiles = tuple(replace(tile, bk=tiles[0].bk) for tile in tiles)
    whole = virtual_gemm_triton.vgemm(x, weight, real(140), None, scale, tiles[0])
    for tile in tiles[1:]:
        for count in (140, 30):
            found = virtual_gemm_triton.vgemm(x[:count], weight, real(count), None, scale, tile)
            assert torch.equal(found, whole[:count])
    if tiles is FP32 and DEVICE.type == "cpu":  # a step of another length adds up in another order, and that shows
        other = virtual_gemm_triton.vgemm(x, weight, real(140), None, scale, replace(tiles[0], bk=16))
        assert not torch.equal(other, whole)


@pytest.mark.parametrize(("rows", "count", "deep"), [(32, 30, 256), (64, 64, 200), (20, 1, 128)])
def test_products_in_fp8(rows: int, count: int, deep: int) -> None:
    """Against the same eight-bit numbers, multiplied in fp64."""
    (x, row_scale), (weight, scale) = (
        quantize_rows_plain(random(size, deep, seed=size)) for size in (rows, 80)
    )  # fmt: skip
    out = torch.full((rows, 80), SENTINEL, device=DEVICE)
    virtual_gemm_triton.vgemm(x, weight, real(count), None, scale, out=out, row_scale=row_scale)
    wanted = (x.double() * row_scale[:, None].double()) @ (weight.double() * scale[:, None].double()).T
    # a tensor core keeps few bits of its sums, next to the greatest of their terms
    steps = (
        1e-3 * (x.double() * row_scale[:, None].double()).abs() @ (weight.double() * scale[:, None].double()).abs().T
    )
    assert ((out[:count].double() - wanted[:count]).abs() <= steps[:count]).all()
    assert out[count:].eq(SENTINEL).all()


def test_the_tiles_of_hoppers_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows have tiles of their own; more rows have the smallest of which every multiprocessor has at most one."""

    def tile(rows: int, outputs: int, kind: torch.dtype = torch.bfloat16) -> tuple[int, int]:
        chosen = config(torch.empty(rows, 64, dtype=torch.bfloat16), torch.empty(outputs, 64, dtype=kind))
        return chosen.bm, chosen.bn

    monkeypatch.setattr(virtual_gemm_triton, "processors", lambda device: 132)
    monkeypatch.setattr(virtual_gemm_triton, "hopper", lambda device: True)
    sizes = [tile(rows, 3584) for rows in (1, 32, 64, 96, 256, 320, 512, 640, 2048)]
    assert sizes == [(32, 64), (32, 64), (64, 32), (128, 32), (128, 64), *2 * [(128, 128)], (128, 256), (128, 256)]
    wide = [tile(rows, 2 * 18944) for rows in (32, 64, 96, 128, 160)]
    assert wide == [(32, 64), (64, 64), (128, 128), (128, 128), (128, 256)]
    eights = [tile(rows, 3584, torch.int8) for rows in (32, 64, 128, 512)]
    assert eights == [(32, 64), (64, 64), (128, 64), (128, 128)]


def test_small_buckets_take_narrow_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the GPU's own processors: every one has a tile, as far as tiles are wide enough for its instructions."""
    monkeypatch.setattr(virtual_gemm_triton, "hopper", lambda device: False)

    def width(rows: int, outputs: int, dtype: torch.dtype = torch.bfloat16, x: torch.dtype = torch.bfloat16) -> int:
        rows_of, weight = torch.empty(rows, 64, dtype=x), torch.empty(outputs, 64, dtype=dtype)
        return config(rows_of, weight).bn

    monkeypatch.setattr(virtual_gemm_triton, "processors", lambda device: 132)
    assert [width(rows, 3584) for rows in (32, 256, 384, 512, 640, 1024, 1280)] == [32, 32, 64, 64, 128, 128, 256]
    assert [width(rows, 3584, torch.int8) for rows in (32, 256, 512, 640)] == [64, 64, 64, 128]
    assert width(32, 2 * 18944) == 256
    assert width(32, 2 * 18944, torch.int8) == 128
    assert [width(rows, 3584, torch.float32, torch.float32) for rows in (32, 192)] == [32, 64]
    monkeypatch.setattr(virtual_gemm_triton, "processors", lambda device: 28)
    assert (width(32, 3584), width(32, 3584, torch.int8)) == (128, 128)


def test_the_dispatcher() -> None:
    x, weight = random(5, 16), random(8, 16, seed=1)
    out = vgemm(x, weight, real(3))
    torch.testing.assert_close(out[:3], x[:3] @ weight.T)
    with pytest.raises(ValueError, match=r"int8 needs scale \[N\]"):
        vgemm(x, weight.to(torch.int8), real(3))
    with pytest.raises(ValueError, match=r"float32 takes no scale"):
        vgemm(x, weight, real(3), None, torch.ones(8))


def product(wide: int, deep: int, tile: GemmTile, arch: int, weight: str = "bf16", x: str = "bf16") -> Variant:
    fp8 = x == "fp8e4nv"
    types = {"x": f"*{x}", "weight": f"*{weight}", "bias": "*bf16", "scale": "*fp32", "row_scale": "*fp32"}
    types |= {"out": "*bf16" if fp8 else f"*{x}", "rows": "*i32"}
    sizes = {"N": wide, "K": deep, "BM": tile.bm, "BN": tile.bn, "BK": tile.bk, "STAGES": tile.stages}
    sizes |= {"GROUP": virtual_gemm_triton.GROUP, "BIAS": True, "SCALED": weight == "i8" or fp8, "FP8": fp8}
    sizes |= {"SWAP": tile.swap}
    return Variant(
        "lopa_dist.kernels.virtual_gemm_triton:vgemm_kernel",
        types,
        {**sizes, "PRECISION": "ieee" if x == "fp32" else "tf32"},
        tuple(types),
        arch,
        {"num_warps": tile.warps},
    )


@pytest.mark.no_gpu
@pytest.mark.parametrize("arch", [80, 89, 90, 100, 120])
def test_cross_compiled(arch: int) -> None:
    """Dream's and LLaDA's sizes: tensor cores, loads that run ahead, hardly a spill, and programs that fit."""
    room = SHARED_LIMIT[arch]
    of_half, of_int8 = (tiles_of(HOPPER), tiles_of(HOPPER_INT8)) if arch == 90 else (HALF, INT8)
    if arch >= 100:  # the widest alone, which use most
        of_half, of_int8 = of_half[:1], of_int8[:1]
    halves_, eights = [fitting(tile, 2, 2, room) for tile in of_half], [fitting(tile, 2, 1, room) for tile in of_int8]
    halves = [product(2 * 18944, 3584, halves_[0], arch)] + [product(3584, 18944, tile, arch) for tile in halves_]
    int8 = [product(4096, 12288, tile, arch, "i8") for tile in eights]
    variants = [*halves, *int8, *(product(576, 192, tile, arch, "fp32", "fp32") for tile in FP32)]
    fp8 = (
        [product(3584, 18944, tile, arch, "fp8e4nv", "fp8e4nv") for tile in tiles_of(HOPPER_FP8)] if arch == 90 else []
    )
    found = compile_all(variants)
    for one, kernel in zip(variants, found, strict=True):
        print(one.arch, one.constexprs, kernel.registers, kernel.stack, kernel.shared)
        assert kernel.stack <= 96, one
        assert kernel.shared <= SHARED_LIMIT[arch], one
        assert "cp.async" in kernel.ptx, one
    # one step along K in all widths, or bits would depend on them: 16 numbers an instruction, of one family
    step = r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k(\d+)\." if arch == 90 else r"mma\.sync\.aligned\.m16n8k(\d+)\."
    for one, kernel in zip(variants[: -len(FP32)], found, strict=False):
        if arch == 100:  # whose instructions name their sizes in a register
            assert "tcgen05.mma" in kernel.ptx, one
            continue
        assert set(re.findall(step, kernel.ptx)) == {"16"}, one
        assert ("mma.sync.aligned.m" in kernel.ptx) == (arch != 90), one
    for one, tile, kernel in zip(fp8, tiles_of(HOPPER_FP8), compile_all(fp8), strict=arch == 90):
        assert re.search(r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k32\.f32\.e4m3\.e4m3", kernel.ptx), one
        assert kernel.stack <= 96
        assert (kernel.shared + 1024) * tile.resident <= 228 * 1024
    if arch == 90:  # as many programs at a time as are launched
        for tile, kernel in zip((*of_half, *of_int8), found[1:], strict=False):
            assert kernel.registers * 32 * tile.warps * tile.resident <= 65536, tile
            assert (kernel.shared + 1024) * tile.resident <= 228 * 1024, tile
