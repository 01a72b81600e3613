"""Top-p and top-k by kernels: the records of the plain head, blind to batch and pad rows.

Without a GPU the kernels are interpreted, and cross-compiled.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lopa_dist.kernels import filters_triton
from lopa_dist.kernels import record_head as record_head_module
from lopa_dist.kernels.filters_triton import filter_kernel
from lopa_dist.kernels.record_head import SHARES, WHOLE, Shard, filter_logits, record_head
from lopa_dist.kernels.sampling import Sampling
from tests.kernels.cross_compile import SHARED_LIMIT, Variant, compile_all
from tests.kernels.forms import by_triton
from tests.kernels.test_record_head_triton import DEVICE, FILTERS, agree, inputs

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
@pytest.mark.parametrize(("rows", "size", "vocabulary"), [(1, 96, 5000), (9, 50, 203)])
def test_against_the_plain_head(sampling: Sampling, rows: int, size: int, vocabulary: int) -> None:
    """With ties, since the logits lie on a coarse grid."""
    hidden, weight, keys = inputs(rows, size, vocabulary)
    found = by_triton(record_head, hidden, weight, 7, keys, sampling, WHOLE, None, True)
    wanted = record_head(hidden.cpu(), weight.cpu(), 7, keys.cpu(), sampling, second_choices=True).to(DEVICE)
    agree(found[:, :3], wanted[:, :3])
    agree(found[:, 3:], wanted[:, 3:])
    assert torch.equal(by_triton(record_head, hidden, weight, 7, keys, sampling, WHOLE, None), found[:, :3])


def filtered(logits: Tensor, mask_id: int, sampling: Sampling) -> Tensor:
    """The logits that the kernel leaves."""
    found = logits.to(DEVICE, copy=True)
    filter_kernel[(len(found),)](
        found, torch.tensor([len(found)], dtype=torch.int32, device=DEVICE), found.shape[1], mask_id, sampling.divisor,
        sampling.top_p, sampling.top_k, TOP_P=sampling.top_p < 1, TOP_K=sampling.top_k > 0,
        COLUMNS=1024, num_warps=filters_triton.WARPS,
    )  # fmt: skip
    return found.cpu()


@pytest.mark.parametrize(("top_p", "top_k"), [(0.8, 0), (1e-9, 0), (1.0, 1), (1.0, 30), (0.5, 3), (0.95, 2999)])
def test_the_same_tokens_stay(top_p: float, top_k: int) -> None:
    """Of logits of both signs, some of which are equal, 0 or -0."""
    logits = torch.randn(5, 3000, generator=torch.Generator().manual_seed(top_k)) * 4
    logits[1] = logits[1].round()
    logits[2] = -logits[2].abs()
    logits[3] = torch.where(torch.arange(3000) % 2 == 0, 0.0, -0.0)
    sampling, lowest = Sampling(temperature=0.5, top_p=top_p, top_k=top_k), torch.finfo(torch.float32).min
    tempered = logits / 0.5
    tempered[:, 77] = lowest
    assert torch.equal(filtered(logits, 77, sampling), filter_logits(tempered, top_p, top_k))


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
def test_pad_rows_take_no_part(monkeypatch: pytest.MonkeyPatch, sampling: Sampling) -> None:
    """In any of the tiles of logits."""
    monkeypatch.setattr(record_head_module, "FILTERED_ROWS", 4)
    hidden, weight, keys = inputs(10, 40, 120)
    hidden += torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    whole = by_triton(record_head, hidden, weight, 5, keys, sampling, WHOLE, None)
    for count in (1, 4, 7):
        padded = hidden.clone()
        padded[count:] = torch.nan
        rows = torch.tensor([count], dtype=torch.int32, device=DEVICE)
        found = by_triton(record_head, padded, weight, 5, keys, sampling, WHOLE, rows)
        assert torch.equal(found[:count], whole[:count])
        alone = by_triton(record_head, hidden[:count], weight, 5, keys[:count], sampling, WHOLE, None)
        assert torch.equal(alone, whole[:count])


def test_tensor_ranks_get_the_bits_of_one() -> None:
    hidden, weight, keys = inputs(9, 40, SHARES * 75)
    whole = by_triton(record_head, hidden, weight, 301, keys, FILTERS[2], WHOLE, None)
    parts = weight.chunk(2)
    for rank, part in enumerate(parts):
        shard = Shard(rank, 2, lambda own, rank=rank: both(own, rank, parts, hidden))
        assert torch.equal(by_triton(record_head, hidden, part, 301, keys, FILTERS[2], shard, None), whole)


def both(own: Tensor, rank: int, parts: Any, hidden: Tensor) -> Tensor:
    """What an all-gather of logits gives."""
    found = torch.stack(
        [torch.nn.functional.pad(hidden @ part.t(), (0, 0, 0, len(own) - len(hidden))) for part in parts]
    )
    assert torch.equal(found[rank], own)
    return found


@pytest.mark.no_gpu
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_cross_compiled(arch: int) -> None:
    """No register is spilled to memory, and the noise has no coarse logarithm."""
    module = "lopa_dist.kernels.filters_triton"
    types = {"logits": "*fp32", "rows": "*i32", "width": "i32", "mask_id": "i32"}
    types |= {"temperature": "fp32", "top_p": "fp32", "top_k": "i32"}
    variants = [
        Variant(
            f"{module}:filter_kernel", types, {"TOP_P": p, "TOP_K": k, "COLUMNS": filters_triton.COLUMNS},
            ("logits", "rows"), arch, {"num_warps": filters_triton.WARPS},
        )
        for p, k in ((True, False), (False, True), (True, True))
    ]  # fmt: skip
    types = {"logits": "*fp32", "keys": "*i64", "parts": "*fp32", "rows": "*i32", "count": "i32", "width": "i32"}
    sizes = {"BM": filters_triton.BM, "BV": filters_triton.BV, "MOMENT": True, "SECOND": True, "NOISE": True}
    sizes |= {"SECOND_CHOICES": True}
    pointers = ("logits", "keys", "parts", "rows")
    variants.append(Variant(f"{module}:logit_sums_kernel", types, sizes, pointers, arch, {"num_warps": 4}))
    for one, kernel in zip(variants, compile_all(variants), strict=True):
        print(one.arch, one.constexprs, kernel.registers, kernel.stack, kernel.shared)
        assert not kernel.stack, one
        assert kernel.shared <= SHARED_LIMIT[89 if arch == 80 else arch], one
        assert "lg2.approx" not in kernel.ptx, one
