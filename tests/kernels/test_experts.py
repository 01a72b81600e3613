"""Rows in groups of their experts: against the plain loop over experts, and in bits that no other row changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lopa_dist.kernels import experts_triton
from lopa_dist.kernels.experts import by_library, expert_linear, height_for, on_gpu, weighted_sum
from lopa_dist.kernels.experts_triton import tile_for
from lopa_dist.kernels.quantized import (
    FP8,
    fp8_linear,
    grouped_fp8_product,
    int8_linear,
    quantize_fp8,
    quantize_int8,
    quantize_rows,
)
from lopa_dist.kernels.routing import Groups, grouped
from lopa_dist.ragged import padded
from tests.kernels.cross_compile import SHARED_LIMIT, Variant, compile_all
from tests.kernels.forms import by_triton, plain

COUNT, CHOSEN, IN, OUT = 9, 3, 48, 32  # widths in whole tiles, as all models have: else no bits are promised
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GENERATOR = torch.Generator().manual_seed(0)
WEIGHT = torch.randn(COUNT, OUT, IN, generator=GENERATOR)
ROWS = torch.randn(200, IN, generator=GENERATOR)
SCORES = torch.rand(200, COUNT, generator=GENERATOR)
SHARES, CHOICES = SCORES.topk(CHOSEN, -1)


def by_expert(kind: str) -> tuple[Tensor, Tensor | None]:
    """The weight as `kind`, and its scales."""
    if kind == "none":
        return WEIGHT, None
    eight, scale = (quantize_int8 if kind == "int8" else quantize_fp8)(WEIGHT.flatten(0, 1))
    return eight.view(WEIGHT.shape), scale.view(COUNT, OUT)


HELD = {kind: by_expert(kind) for kind in ("none", "int8", "fp8")}


def products(rows: Tensor, kind: str = "none") -> Tensor:
    """What the experts of these rows of `ROWS` give."""
    weight, scale = HELD[kind]
    groups = grouped(CHOICES[rows], len(weight))
    out = expert_linear(ROWS[rows][groups.choice // CHOSEN], weight, groups, scale)
    return weighted_sum(out, groups, SHARES[rows])


def loop(rows: Tensor, kind: str) -> Tensor:
    """By linears of one expert and one row."""
    weight, scale = HELD[kind]
    linear = {"int8": int8_linear, "fp8": fp8_linear}.get(kind)
    out = torch.zeros(len(rows), OUT)
    for number, row in enumerate(rows.tolist()):
        for expert, share in zip(CHOICES[row].tolist(), SHARES[row], strict=True):
            x = ROWS[row : row + 1]
            out[number] += share * (linear(x, weight[expert], scale[expert]) if linear else x @ weight[expert].T)[0]
    return out


@pytest.mark.parametrize("kind", HELD)
@pytest.mark.parametrize("count", [1, 5, 200])
def test_it_is_the_loop_over_experts(count: int, kind: str) -> None:
    rows = torch.arange(count)
    wanted = loop(rows, kind)
    assert (products(rows, kind) - wanted).abs().max() <= 1e-6 * wanted.abs().max()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 199), min_size=1, max_size=70), st.integers(0, 199), st.sampled_from([*HELD]))
def test_a_rows_bits_depend_on_itself_alone(others: list[int], row: int, kind: str) -> None:
    """Among any other rows, at any place, with its expert's group small or large."""
    alone = products(torch.tensor([row]), kind)[0]
    among = products(torch.tensor([*others, row]), kind)[-1]
    first = products(torch.tensor([row, *others]), kind)[0]
    assert torch.equal(among, alone)
    assert torch.equal(first, alone)


@given(st.lists(st.integers(0, 199), min_size=1, max_size=70))
@settings(max_examples=40, deadline=None)
def test_groups_are_whole_tiles_in_the_order_of_experts(rows: list[int]) -> None:
    chosen = CHOICES[rows]
    groups = grouped(chosen, COUNT)
    counts = torch.bincount(chosen.flatten(), minlength=COUNT)
    ends = groups.ends.tolist()
    begins = [0, *ends[:-1]]
    assert [e - b for b, e in zip(begins, ends, strict=True)] == [padded(int(c)) for c in counts]
    assert len(groups.choice) == ends[-1]
    for number, (expert, place) in enumerate(
        zip(chosen.flatten().tolist(), groups.place.flatten().tolist(), strict=True)
    ):
        assert begins[expert] <= place < ends[expert]
        assert groups.choice[place] == number


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this torch has no grouped product")
def test_the_grouped_product_of_a_gpu_takes_the_same_groups() -> None:
    """On a CPU it runs, too, also with room after the last group, as there is where the host does not count."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(COUNT, 16, 32, generator=generator).bfloat16()
    groups = grouped(CHOICES[:50], COUNT)
    x = torch.randn(150, 32, generator=generator).bfloat16()[groups.choice]
    wanted = expert_linear(x, weight, groups)
    longer = torch.cat([x, x.new_zeros(64, 32)])
    found = F.grouped_mm(longer, weight.transpose(1, 2), offs=groups.ends)[: len(x)]
    assert (found.float() - wanted.float()).abs().max() <= 0.05 * wanted.float().abs().max()


@pytest.mark.parametrize("height", [16, 64])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    # the interpreter has no int8 times bf16
    [("none", torch.float32), ("none", torch.float16), ("none", torch.bfloat16), ("int8", torch.float32),
     ("int8", torch.float16)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("count", [1, 50])
def test_tritons_product(count: int, kind: str, dtype: torch.dtype, height: int) -> None:
    """Interpreted where there is no GPU: right, blind to what comes after, a row's bits its own."""
    held, scale = HELD[kind]
    weight = held if kind == "int8" else held.to(dtype)

    def product(groups: Groups, x: Tensor) -> Tensor:
        rest = torch.full((2 * height, IN), torch.nan, dtype=dtype)
        given = torch.cat([x, rest]).to(DEVICE), weight.to(DEVICE), None if scale is None else scale.to(DEVICE)
        return experts_triton.expert_linear(*given, groups.ends.to(DEVICE), height).cpu()

    groups = grouped(CHOICES[:count], COUNT, height)
    assert (groups.ends % height == 0).all()
    x = ROWS[:count].to(dtype)[groups.choice // CHOSEN]
    wanted = expert_linear(x.float(), weight.float() if scale is None else weight, groups, scale)
    found = product(groups, x)
    steps = 8 * torch.finfo(dtype).eps
    assert torch.allclose(found[: len(x)].float(), wanted.float(), rtol=steps, atol=steps * IN**0.5)
    if count > 1:
        few = grouped(CHOICES[7:9], COUNT, height)
        alone = product(few, ROWS[7:9].to(dtype)[few.choice // CHOSEN])
        assert torch.equal(alone[few.place], found[groups.place[7:9]])


@pytest.mark.parametrize(
    ("capability", "dtype", "weight", "library"),
    [
        ((9, 0), torch.bfloat16, torch.bfloat16, True),
        ((10, 0), torch.bfloat16, torch.bfloat16, True),
        ((8, 0), torch.bfloat16, torch.bfloat16, False),  # torch loops over experts there, with waits of the host
        ((8, 9), torch.bfloat16, torch.bfloat16, False),
        ((12, 0), torch.bfloat16, torch.bfloat16, False),
        ((9, 0), torch.float16, torch.float16, False),
        ((9, 0), torch.bfloat16, torch.int8, False),
        ((9, 0), torch.bfloat16, FP8, True),
    ],
)  # fmt: skip
def test_where_torchs_grouped_product_would_wait_tritons_multiplies(
    capability: tuple[int, int], dtype: torch.dtype, weight: torch.dtype, library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert by_library(torch.device("cuda:0"), dtype, weight) == library
    if weight == FP8:
        return
    called = []
    monkeypatch.setattr(experts_triton, "expert_linear", lambda *given: called.append("Triton"))
    monkeypatch.setattr(F, "grouped_mm", lambda *given, **named: called.append("torch"))
    x, groups = torch.zeros(16, 32, dtype=dtype), grouped(torch.zeros(3, 1, dtype=torch.long), 1)
    scale = torch.ones(1, 16) if weight == torch.int8 else None
    by_triton(on_gpu, x, torch.zeros(1, 16, 32, dtype=weight), groups, scale)
    assert called == ["torch" if library else "Triton"]


def test_tiles_are_tall_where_experts_have_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))

    class OnGpu:
        is_cuda, dtype, device = True, torch.bfloat16, torch.device("cuda:0")

    x: Any = OnGpu()
    weight = torch.zeros(8, 2, 2, dtype=torch.bfloat16)
    assert [height_for(choices, x, weight) for choices in (8, 256, 257)] == [16, 16, 64]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert height_for(10**6, x, weight) == 16, "torch's product needs no taller ones"


def test_without_triton_int8_experts_are_widened_on_a_gpu() -> None:
    """In torch's own products, which know no int8."""
    generator = torch.Generator().manual_seed(1)
    groups = grouped(CHOICES[:50], COUNT)
    weight, scale = quantize_int8(torch.randn(COUNT * 16, 32, generator=generator))
    weight, scale = weight.view(COUNT, 16, 32), scale.view(COUNT, 16)
    x = torch.randn(150, 32, generator=generator).bfloat16()[groups.choice]
    found = plain(on_gpu, x, weight, groups, scale)
    wanted = expert_linear(x, weight, groups, scale)
    assert (found.float() - wanted.float()).abs().max() <= 0.05 * wanted.float().abs().max()


def test_the_librarys_fp8_product_takes_the_groups_as_they_are() -> None:
    """Without a GPU its shapes and layouts are checked, not its numbers."""
    groups = grouped(CHOICES[:50], COUNT)
    x = torch.zeros(len(groups.choice), 32).bfloat16()
    weight, scale = torch.empty(COUNT, 48, 32).to(FP8), torch.ones(COUNT, 48)
    rows = quantize_rows(x)
    given = (rows.eight, rows.scale, weight, scale, groups.ends)
    device = "cuda" if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0) else "meta"
    out = grouped_fp8_product(*(part.to(device) for part in given))
    assert (out.shape, out.dtype) == ((len(x), 48), torch.bfloat16)


@pytest.mark.parametrize("arch", [80, 89, 90, 120])
def test_cross_compiled(arch: int) -> None:
    """LLaDA2-mini's sizes, in all tiles: tensor cores but in fp32, loads that run ahead, no spills, blocks that fit."""
    single, half, eight = (torch.float32, "fp32"), (torch.bfloat16, "bf16"), (torch.int8, "i8")
    other_half = torch.float16, "fp16"
    variants = []
    for n, k in ((2 * 512, 2048), (2048, 512)) if arch == 90 else ((2 * 512, 2048),):
        for x, weight in ((half, half), (half, eight), (other_half, other_half), (single, single), (single, eight)):
            for height in (16, 64):
                tile = tile_for(x[0], weight[0], height, SHARED_LIMIT[arch])
                types = {
                    "x": f"*{x[1]}",
                    "weight": f"*{weight[1]}",
                    "scale": "*fp32",
                    "out": f"*{x[1]}",
                    "ends": "*i32",
                }
                sizes = {"E": 256, "E_BLOCK": 256, "N": n, "K": k, "BM": height, "BN": tile.bn, "BK": tile.bk}
                sizes |= {"STAGES": tile.stages, "SCALED": weight == eight}
                sizes["PRECISION"] = "ieee" if x == single else "tf32"
                kernel = "lopa_dist.kernels.experts_triton:expert_kernel"
                variants.append(Variant(kernel, types, sizes, tuple(types), arch, {"num_warps": tile.warps}))
    for one, kernel in zip(variants, compile_all(variants), strict=True):
        wide = one.signature["x"] == "*fp32"
        assert kernel.stack <= (1024 if wide else 96), one
        assert kernel.shared <= SHARED_LIMIT[arch], one
        assert wide or ("wgmma" if arch == 90 else "mma.sync") in kernel.ptx, one
        assert "cp.async" in kernel.ptx, one
        if wide:
            print(arch, one.constexprs["BM"], one.constexprs["SCALED"], kernel.registers, kernel.stack, kernel.shared)
