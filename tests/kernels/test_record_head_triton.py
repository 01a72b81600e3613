"""The record head without logits: the plain head's records, blind to batch, pad rows and tensor ranks.

Without a GPU the kernels are interpreted, and cross-compiled.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from lopa_dist.kernels import random, record_head_triton
from lopa_dist.kernels.record_head import SHARES, WHOLE, Shard, _records, record_head
from lopa_dist.kernels.record_head_triton import HeadTile, config, gumbel, merged_records, share_sums
from lopa_dist.kernels.sampling import Sampling
from tests.kernels.cross_compile import SHARED_LIMIT, Variant, compile_all
from tests.kernels.forms import by_triton

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RULES = (
    Sampling("neg_entropy"),
    Sampling("margin"),
    Sampling("probability", 0.7),
    Sampling("neg_entropy", 1.3),
    Sampling("margin", 1.0),
)
FILTERS = (
    Sampling("neg_entropy", 0.7, top_p=0.8),
    Sampling("margin", 1.0, top_k=5),
    Sampling("probability", 1.3, top_p=0.9, top_k=40),
)


def inputs(rows: int, size: int, vocabulary: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, head and keys, on a coarse grid: logits are exact in any order and dtype, and ties are common."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randint(-2, 3, (rows, size), generator=generator).to(dtype)
    weight = (torch.randint(-3, 4, (vocabulary, size), generator=generator) / 8).to(dtype)
    keys = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    return hidden.to(DEVICE), weight.to(DEVICE), keys.to(DEVICE)


def agree(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == torch.int32
    assert torch.equal(found[:, 0], wanted[:, 0])
    numbers, right = (x[:, 1:].contiguous().view(torch.float32) for x in (found, wanted))
    assert torch.allclose(numbers, right, rtol=2e-5, atol=3e-6)


@pytest.mark.parametrize("sampling", RULES, ids=str)
@pytest.mark.parametrize(("rows", "size", "vocabulary"), [(1, 96, 1000), (17, 50, 203), (70, 32, 520)])
def test_against_the_plain_head(sampling: Sampling, rows: int, size: int, vocabulary: int) -> None:
    hidden, weight, keys = inputs(rows, size, vocabulary)
    found = by_triton(record_head, hidden, weight, 7, keys, sampling, WHOLE, None)
    agree(found, record_head(hidden.cpu(), weight.cpu(), 7, keys.cpu(), sampling).to(DEVICE))


@pytest.mark.parametrize("sampling", RULES[2:4], ids=str)
@pytest.mark.parametrize(("rows", "size", "vocabulary"), [(17, 50, 203), (9, 40, SHARES * 75)])
def test_second_choices_against_the_plain_head(sampling: Sampling, rows: int, size: int, vocabulary: int) -> None:
    hidden, weight, keys = inputs(rows, size, vocabulary)
    for rule in (sampling, RULES[0]):  # drawn, and greedy
        found = by_triton(record_head, hidden, weight, 7, keys, rule, WHOLE, None, True)
        wanted = record_head(hidden.cpu(), weight.cpu(), 7, keys.cpu(), rule, second_choices=True).to(DEVICE)
        agree(found[:, :3], wanted[:, :3])
        agree(found[:, 3:], wanted[:, 3:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [5, 80])
def test_two_byte_numbers_and_both_heights(dtype: torch.dtype, rows: int) -> None:
    hidden, weight, keys = inputs(rows, 72, 300, dtype)
    for sampling in RULES[:1] + RULES[-1:]:
        found = by_triton(record_head, hidden, weight, 299, keys, sampling, WHOLE, None)
        wanted = record_head(hidden.float().cpu(), weight.float().cpu(), 299, keys.cpu(), sampling)
        agree(found, wanted.to(DEVICE))


@pytest.mark.parametrize("sampling", RULES, ids=str)
def test_a_last_tile_with_nothing_but_the_mask(sampling: Sampling) -> None:
    hidden, weight, keys = inputs(3, 32, 65)  # tiles of fp32 are 64 tokens wide
    agree(
        by_triton(record_head, hidden, weight, 64, keys, sampling, WHOLE, None),
        record_head(hidden.cpu(), weight.cpu(), 64, keys.cpu(), sampling).to(DEVICE),
    )


def test_of_equal_logits_the_lower_id_wins_and_the_mask_never() -> None:
    weight = torch.zeros(400, 16, device=DEVICE)
    weight[[3, 70, 71, 130, 399]] = 1.0
    hidden = torch.ones(2, 16, device=DEVICE)
    for sampling in RULES[:2]:
        records = by_triton(record_head, hidden, weight, 3, None, sampling, WHOLE, None)
        assert records[:, 0].tolist() == [70, 70]
    assert not records[:, 2].any()  # no margin at all


@pytest.mark.parametrize("sampling", RULES[1:4], ids=str)
def test_tensor_ranks_get_the_bits_of_one(sampling: Sampling) -> None:
    hidden, weight, keys = inputs(9, 40, SHARES * 75)
    hidden = hidden + torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    whole = by_triton(record_head, hidden, weight, 301, keys, sampling, WHOLE, None)
    for size in (2, 4):
        parts = weight.chunk(size)
        shares = SHARES // size
        sums = torch.stack(
            [share_sums(hidden, p, i * len(p), shares, 301, keys, sampling) for i, p in enumerate(parts)]
        )
        for rank, part in enumerate(parts):
            shard = Shard(rank, size, lambda own, rank=rank, sums=sums: check_own(own, rank, sums))
            assert torch.equal(by_triton(record_head, hidden, part, 301, keys, sampling, shard, None), whole)


def check_own(own: Tensor, rank: int, sums: Tensor) -> Tensor:
    """What an all-gather gives."""
    assert torch.equal(own, sums[rank])
    return sums


@pytest.mark.parametrize("sampling", RULES[2:4], ids=str)
def test_pad_rows_take_no_part(sampling: Sampling) -> None:
    hidden, weight, keys = inputs(150, 40, 200)
    hidden += torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    whole = by_triton(record_head, hidden, weight, 5, keys, sampling, WHOLE, None)
    for count in (1, 64, 77):
        padded = hidden.clone()
        padded[count:] = torch.nan
        rows = torch.tensor([count], dtype=torch.int32, device=DEVICE)
        found = by_triton(record_head, padded, weight, 5, keys, sampling, WHOLE, rows)
        assert torch.equal(found[:count], whole[:count])
        assert torch.equal(
            by_triton(record_head, hidden[:count], weight, 5, keys[:count], sampling, WHOLE, None), found[:count]
        )


@pytest.mark.parametrize("confidence", ["probability", "margin", "neg_entropy"])
@pytest.mark.parametrize("kinds", [7, 10])
@pytest.mark.parametrize("shares", [1, 3, 8])
def test_records_of_sums(confidence: str, kinds: int, shares: int) -> None:
    """Of any sums; the second logit of a share is below its greatest one."""
    generator = torch.Generator().manual_seed(shares)
    sums = torch.randint(-6, 7, (kinds, 70, shares), generator=generator) / 2.0
    sums[1] = sums[0] - sums[1].abs()
    sums[2] = 1 + sums[2].abs()
    sums[6::3] = torch.randint(0, 2**24, sums[6::3].shape, generator=generator).float()
    found = merged_records(sums.to(DEVICE), confidence)
    agree_in_all(found, _records(sums, Sampling(confidence)).to(DEVICE))


def agree_in_all(found: Tensor, wanted: Tensor) -> None:
    """Of records with or without the second choice."""
    for begin, end in ((0, 3), (3, found.shape[1])):
        if end > begin:
            agree(found[:, begin:end], wanted[:, begin:end])


def test_a_row_of_nan_still_gives_a_token() -> None:
    hidden, weight, keys = inputs(3, 32, 130)
    hidden[1] = torch.nan
    for sampling in RULES + FILTERS:
        tokens = by_triton(record_head, hidden, weight, 5, keys, sampling, WHOLE, None)[:, 0]
        assert tokens.ge(0).all()
        assert tokens.lt(130).all()


def test_no_rows_give_no_records() -> None:
    """Nor need they have keys: a chunk of a prompt has none, even if its request is sampled."""
    hidden, weight, _ = inputs(0, 32, 130)
    for sampling in (*RULES, *FILTERS):
        assert by_triton(record_head, hidden, weight, 5, None, sampling, WHOLE, None).shape == (0, 3)


@triton.jit
def gumbel_kernel(keys: tl.tensor, out: tl.tensor, first: tl.tensor, H: tl.constexpr, V: tl.constexpr) -> None:
    row, column = tl.arange(0, H), tl.arange(0, V)
    noise = gumbel(tl.load(keys + row), first + column)
    tl.store(out + row[:, None] * V + column[None], noise)


@pytest.mark.parametrize("first", [0, 151_665])
def test_the_noise_is_the_plain_one(first: int) -> None:
    keys = torch.tensor([0, 1, -5, 26, 2**63 - 1, -(2**63), 1 << 60, 77], device=DEVICE)
    out = torch.empty(8, 1024, device=DEVICE)
    gumbel_kernel[(1,)](keys, out, first, H=8, V=1024)
    wanted = random.gumbel(keys, torch.arange(first, first + 1024, device=DEVICE))
    assert torch.allclose(out, wanted, rtol=1e-5, atol=1e-6)  # another bit of the hash would be far off


def test_tiles_of_one_type_are_cut_alike_in_any_batch() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for hopper in (True, False):
            found = [config(rows, dtype, noise, hopper) for rows in (1, 64, 65, 5000) for noise in (True, False)]
            assert len({(tile.bv, tile.bk) for tile in found}) == 1
            assert hopper or len({replace(tile, stages=0) for tile in found}) == 1


def head(tile: HeadTile, size: int, arch: int, dtype: str = "bf16", **rules: bool) -> Variant:
    numbers = ("count", "first", "mask_id", "share", "tiles", "all_tiles", "row_tiles")
    types = {"hidden": f"*{dtype}", "weight": f"*{dtype}", "keys": "*i64", "parts": "*fp32", "rows": "*i32"}
    sizes: dict[str, Any] = {"K": size, "BM": tile.bm, "BV": tile.bv, "BK": tile.bk, "STAGES": tile.stages}
    sizes |= {"GROUP": record_head_triton.GROUP, "PRECISION": "ieee" if dtype == "fp32" else "tf32"}
    sizes |= {"MOMENT": False, "SECOND": False, "NOISE": False, "SECOND_CHOICES": False} | rules
    return Variant(
        "lopa_dist.kernels.record_head_triton:tile_sums_kernel",
        {**types, **dict.fromkeys(numbers, "i32"), "temperature": "fp32"},
        sizes,
        tuple(types),
        arch,
        {"num_warps": tile.warps},
    )


@pytest.mark.no_gpu
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_cross_compiled(arch: int) -> None:
    """Dream's and LLaDA's sizes: tensor cores, loads that run ahead, hardly a spill, and programs that fit."""
    bf16, hopper, moment = torch.bfloat16, arch == 90, {"MOMENT": True}
    few, many = config(64, bf16, False, hopper), config(65, bf16, False, hopper)
    noisy = config(65, bf16, True, hopper)
    variants = [head(few, 3584, arch, **moment), head(noisy, 4096, arch, NOISE=True, SECOND=True)]
    variants += [head(noisy, 3584, arch, SECOND_CHOICES=True, NOISE=True)]
    if hopper:  # elsewhere, those that use most
        variants += [head(many, 3584, arch, **moment), head(many, 4096, arch, SECOND=True)]
        variants += [head(few, 3584, arch, SECOND_CHOICES=True, **moment), head(few, 3584, arch, NOISE=True, **moment)]
    fp32 = head(config(9, torch.float32, True, hopper), 192, arch, "fp32", NOISE=True, **moment)
    types = {"parts": "*fp32", "sums": "*fp32", "rows": "*i32", "count": "i32", "tiles": "i32", "shares": "i32"}
    sizes = {"TILES": 256, "ROWS": record_head_triton.MERGED // 256, "MOMENT": True, "SECOND": True, "NOISE": True}
    sizes["SECOND_CHOICES"] = True
    merge = "lopa_dist.kernels.record_head_triton:share_sums_kernel"
    last = Variant(merge, types, sizes, ("parts", "sums", "rows"), arch, {"num_warps": 4})
    of_records = "lopa_dist.kernels.record_head_triton:records_kernel"
    types = {"sums": "*fp32", "records": "*i32", "count": "i32", "shares": "i32"}
    sizes = {"SHARES": SHARES, "ROWS": record_head_triton.RECORD_ROWS, "SECOND_CHOICES": True}
    records = [
        Variant(of_records, types, sizes | {"CONFIDENCE": name}, ("sums", "records"), arch, {"num_warps": 4})
        for name in ("margin", "neg_entropy")
    ]
    every = [*variants, fp32, last, *records]
    found = compile_all(every)
    assert not any("lg2.approx" in kernel.ptx or kernel.stack for kernel in found[-2:])
    for one, kernel in zip(every, found, strict=True):
        print(one.arch, one.constexprs, kernel.registers, kernel.stack, kernel.shared)
        assert kernel.stack <= 192, one  # registers are spilled only after the loop over K (read in the machine code)
        assert kernel.shared <= SHARED_LIMIT[89 if arch == 80 else arch], one  # sm_89 has the same tiles, and less room
    for one, kernel in zip(variants, found, strict=False):
        assert {90: "wgmma.mma_async", 100: "tcgen05.mma"}.get(arch, "mma.sync") in kernel.ptx, one
        assert "cp.async.cg.shared.global" in kernel.ptx, one  # 16 bytes at a time
        assert "lg2.approx" not in kernel.ptx, one  # of a number close to 1 it would be far off
    if hopper:
        for kernel, warps in ((found[0], few.warps), (found[3], many.warps)):  # two at a time
            assert kernel.registers * 32 * warps * 2 <= 65536
            assert (kernel.shared + 1024) * 2 <= 228 * 1024
        for kernel in found[: len(variants)]:  # a warp has whole rows, so heights agree on the order of sums
            assert "warpsPerCTA = [4, 1]" in kernel.ttgir or "warpsPerCTA = [8, 1]" in kernel.ttgir
