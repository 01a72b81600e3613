"""Routing: its kernels against torch's operators, what they do with ties and NaN, and how many operations there are."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lopa_dist.kernels import experts, experts_triton, routing, routing_triton, rows, rows_triton
from lopa_dist.kernels.experts import weighted_sum
from lopa_dist.kernels.routing import Groups, Router, choose, grouped, routed
from lopa_dist.kernels.routing_triton import warps_for
from lopa_dist.models import experts as mixtures
from lopa_dist.models.config import Experts
from lopa_dist.models.experts import SparseMLP
from lopa_dist.models.transformer import MLP
from tests.kernels.cross_compile import Variant, compile_all
from tests.kernels.forms import by_triton, plain

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROUTERS = {
    "softmax": (12, Router(3, False)),
    "softmax, to 1": (12, Router(3, True)),
    "softmax of one": (5, Router(1, True)),
    "sigmoids": (12, Router(3, True, sigmoid=True, scale=2.5)),
    "sigmoids in groups": (32, Router(5, True, sigmoid=True, scale=2.5, groups=8, chosen_groups=4)),
    "sigmoids of one": (16, Router(1, True, sigmoid=True, groups=4, chosen_groups=1)),
}
few = settings(
    max_examples=6, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.reuse, Phase.generate]
)


def drawn(count: int, experts: int, sigmoid: bool, seed: int) -> tuple[Tensor, Tensor | None]:
    """Logits of rows and a bias."""
    draw = torch.Generator().manual_seed(seed)
    logits, bias = (torch.randn(*size, experts, generator=draw).to(DEVICE) for size in ((count,), ()))
    return 2 * logits, bias / 4 if sigmoid else None


@pytest.mark.parametrize("name", ROUTERS)
@given(count=st.integers(1, 40) | st.integers(257, 300), height=st.sampled_from([16, 64]), seed=st.integers(0, 1000))
@few
def test_the_kernels_route_as_torch_does(name: str, count: int, height: int, seed: int) -> None:
    """The same experts, weights to rounding, and the same places: also in several blocks of rows, of both sizes."""
    experts, router = ROUTERS[name]
    given_ = (*drawn(count, experts, router.sigmoid, seed), router)
    chosen, wanted = choose(*given_)
    places = grouped(chosen, experts, height)
    weights, groups = by_triton(routed, *given_, height)
    assert torch.allclose(weights, wanted, rtol=1e-5, atol=1e-6)
    assert (groups.height, groups.place.dtype, groups.ends.dtype) == (height, places.place.dtype, torch.int32)
    end = int(places.ends[-1])
    assert torch.equal(groups.ends, places.ends)
    assert torch.equal(groups.place, places.place)
    assert torch.equal(groups.choice[:end], places.choice[:end])
    assert torch.equal(groups.row, groups.choice // router.chosen)
    assert not groups.choice[end:].any(), "rows after the last group read row 0"
    assert len(groups.choice) == routing.room_for(count * router.chosen, experts, height)


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize(("count", "real"), [(40, 1), (40, 16), (40, 40), (300, 270)])
def test_padded_rows_go_to_no_expert(name: str, count: int, real: int) -> None:
    """Real rows have the places that they have alone, and no expert's weights are read for padding."""
    experts, router = ROUTERS[name]
    logits, bias = drawn(count, experts, router.sigmoid, 7)
    alone, wanted = by_triton(routed, logits[:real], bias, router, 16)
    rows = torch.tensor([real], dtype=torch.int32, device=DEVICE)
    weights, groups = by_triton(routed, logits, bias, router, 16, rows)
    end = int(wanted.ends[-1])
    assert torch.equal(groups.ends, wanted.ends)
    assert torch.equal(groups.place[:real], wanted.place)
    assert not groups.place[real:].any()
    assert torch.equal(groups.choice[:end], wanted.choice[:end])
    assert torch.equal(groups.row[:end], wanted.row[:end])
    assert not groups.choice[end:].any()
    assert torch.equal(weights[:real], alone)


def test_with_no_real_row_one_goes_to_experts() -> None:
    """As when a graph is captured: all groups would be empty."""
    logits, bias = drawn(40, 12, False, 7)
    rows = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    _, groups = by_triton(routed, logits, bias, Router(3, True), 16, rows)
    assert int(groups.ends[-1]) == 48


def test_without_rows_groups_are_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernels would have written is not read, and no product runs (`engine.runner` may want no row)."""
    filled = torch.empty
    monkeypatch.setattr(routing_triton.torch, "empty", lambda *size, **named: filled(*size, **named).fill_(2**31 - 1))
    _, groups = by_triton(routed, torch.zeros(0, 12, device=DEVICE), None, Router(3, True), 16)
    assert not groups.ends.any()
    monkeypatch.setattr(mixtures, "expert_linear", None)
    mlp = SparseMLP(16, Experts(8, 2, 16, "softmax", True)).to(DEVICE)
    assert mlp(torch.zeros(0, 16, device=DEVICE)).shape == (0, 16)


@pytest.mark.parametrize("name", ROUTERS)
def test_a_row_of_nan_chooses_experts_and_changes_no_other_row(name: str) -> None:
    """Padding may hold anything."""
    experts, router = ROUTERS[name]
    logits, bias = drawn(40, experts, router.sigmoid, 3)
    clean, _ = by_triton(routed, logits, bias, router, 16)
    logits[7] = torch.nan
    logits[8, ::2] = torch.inf
    logits[9] = -torch.inf
    weights, groups = by_triton(routed, logits, bias, router, 16)
    kept = [row for row in range(40) if row not in (7, 8, 9)]
    assert torch.equal(weights[kept], clean[kept])
    places = groups.place.flatten()
    assert len(places.unique()) == len(places), "experts of a row are distinct"
    assert torch.equal(groups.choice[places], torch.arange(len(places), device=DEVICE))


def test_of_equal_experts_the_first_are_chosen() -> None:
    _, groups = by_triton(routed, torch.zeros(2, 12, device=DEVICE), None, Router(3, True), 16)
    assert groups.ends.tolist() == [16, 32, 48] + [48] * 9


def test_groups_that_are_no_powers_of_two_are_torchs() -> None:
    router = Router(2, True, sigmoid=True, groups=3, chosen_groups=2)
    assert not routing_triton.takes(router, 12)
    logits, bias = drawn(9, 12, True, 1)
    weights, groups = by_triton(routed, logits, bias, router, 16)
    wanted, places = plain(routed, logits, bias, router, 16)
    assert torch.equal(weights, wanted)
    assert torch.equal(groups.place, places.place)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 48), (40, 1300)])
def test_the_sum_has_torchs_bits(rows: int, size: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(rows)
    chosen = torch.rand(rows, 9, generator=draw).topk(3, -1).indices
    groups = grouped(chosen, 9)
    x = torch.randn(len(groups.choice), size, generator=draw).to(dtype)
    weights = torch.rand(rows, 3, generator=draw)
    given_ = x.to(DEVICE), groups._replace(place=groups.place.to(DEVICE)), weights.to(DEVICE)
    found, wanted = by_triton(weighted_sum, *given_), plain(weighted_sum, *given_)
    if dtype == torch.bfloat16 and DEVICE.type == "cpu":  # the interpreter cuts off where it should round
        assert torch.allclose(found.float(), wanted.float(), rtol=2**-7, atol=1e-6)
    else:
        assert torch.equal(found, wanted)


VIEWS = {
    "view", "transpose", "t", "expand", "select", "slice", "unsqueeze", "squeeze", "permute", "_unsafe_view", "detach",
    "alias", "split", "split_with_sizes", "unbind", "as_strided", "narrow", "_reshape_alias", "unflatten", "empty_like",
    "new_empty", "empty", "_local_scalar_dense",
}  # fmt: skip


class Operations(TorchDispatchMode):
    """Counts what a GPU would be given to do: operators of torch, but for views, and kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        self.found[name] += name not in VIEWS
        return func(*args, **(kwargs or {}))

    def kernel(self, name: str) -> Any:
        """Return what takes the place of a Triton kernel, and counts its launches."""

        class Launches:
            def __getitem__(launches, grid: Any) -> Any:
                self.found[name] += 1
                return lambda *given, **named: None

        return Launches()


@pytest.mark.parametrize("router", ["grouped_sigmoid", "softmax"])
def test_a_layer_takes_few_operations(router: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 3,200 rows in bf16, as a GPU is given them, with both products of experts: 90 before there were kernels."""
    shared = 32 * (router == "grouped_sigmoid")
    of = (True, 2.5, 8, 4, shared) if shared else (True,)
    mlp = SparseMLP(64, Experts(64, 8, 32, router, *of), MLP(64, 32) if shared else None).to(torch.bfloat16)
    x = torch.randn(3200, 64).bfloat16()
    count = Operations()
    for module in (routing, experts, rows):
        monkeypatch.setattr(module, "fused", lambda *_: True)
    for module, names in (
        (routing_triton, ("choose_kernel", "place_kernel")), (experts_triton, ("expert_kernel", "sum_kernel")),
        (rows_triton, ("swiglu_kernel",)),
    ):  # fmt: skip
        for name in names:
            monkeypatch.setattr(module, name, count.kernel(name))
    monkeypatch.setattr(mixtures, "expert_linear", experts.on_gpu)
    monkeypatch.setattr(experts, "by_library", lambda *_: False)
    # nothing writes the places here: rows are taken from where the counted kernels would say
    right = routing_triton.routed

    def routed_(*given: Any) -> tuple[Tensor, Groups]:
        weights, groups = right(*given)
        return weights, groups._replace(row=groups.row.fill_(0))

    monkeypatch.setattr(routing_triton, "routed", routed_)
    with torch.inference_mode():
        mlp(x)  # which keeps the router's weight in fp32
        count.found.clear()
        with count:
            mlp(x)
    count.found -= Counter({"fill_": 1})
    print(router, dict(count.found))
    assert count.found["expert_kernel"] == 2
    assert sum(count.found.values()) <= 19


@pytest.mark.parametrize("router", ["grouped_sigmoid", "softmax"])
@torch.inference_mode()
def test_a_layer_by_kernels_is_the_layer(router: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of = (True, 2.5, 4, 2, 32) if router == "grouped_sigmoid" else (True,)
    mlp = SparseMLP(32, Experts(16, 4, 16, router, *of), MLP(32, 32) if of[1:] else None)
    draw = torch.Generator().manual_seed(0)
    for weight in mlp.parameters():
        weight.normal_(0, 0.2, generator=draw)
    x = torch.randn(50, 32, generator=draw)
    wanted = mlp(x)
    for module in (routing, experts, rows):
        monkeypatch.setattr(module, "fused", lambda *_: True)
    monkeypatch.setattr(mixtures, "expert_linear", experts.on_gpu)
    monkeypatch.setattr(experts, "by_library", lambda *_: False)
    assert torch.allclose(mlp(x), wanted, atol=1e-5)


def test_the_routers_weight_is_cast_once() -> None:
    mlp = SparseMLP(16, Experts(8, 2, 16, "grouped_sigmoid", True, 1.0, 2, 1)).bfloat16()
    with torch.inference_mode():
        mlp.gate.weight.normal_(generator=torch.Generator().manual_seed(0))
        first = mlp.gate.in_fp32()
        assert first.dtype == torch.float32
        assert mlp.gate.in_fp32() is first
    mlp.gate.weight = torch.nn.Parameter(2 * mlp.gate.weight.detach().clone())
    with torch.inference_mode():
        assert torch.equal(mlp.gate.in_fp32(), 2 * first), "another weight is another one"
    mlp.gate.weight.requires_grad_(True)
    mlp.gate.in_fp32().sum().backward()  # what is trained is cast anew
    assert mlp.gate.weight.grad is not None


@pytest.mark.parametrize("arch", [80, 90])
def test_cross_compiled(arch: int) -> None:
    """LLaDA2's and SDAR's routers, of few rows and of many: hardly any spills."""
    variants = []
    for count, sigmoid, groups in ((256, True, 8), (128, False, 1)):
        for block in (4, 16) if arch == 90 else (16,):
            warps = {"num_warps": warps_for(block * count)}
            types = {"logits": "*fp32" if sigmoid else "*bf16", "bias": "*fp32", "chosen": "*i32", "weights": "*fp32"}
            types = {"logits": types.pop("logits"), "bias": types.pop("bias"), "real_rows": "*i32"} | types
            types |= {"counts": "*i32", "choice": "*i64", "row_of": "*i64", "rows": "i32", "room": "i32"}
            sizes = {"E": count, "WIDTH": count, "CHOSEN": 8, "CHOICES": 8, "GROUPS": groups, "CHOSEN_GROUPS": 4}
            sizes |= {"SIGMOID": sigmoid, "RENORMALISE": True, "SCALE": 2.5, "BLOCK": block, "PADDED": True}
            kernel = "lopa_dist.kernels.routing_triton:choose_kernel"
            variants.append(Variant(kernel, types, sizes, tuple(types)[:8], arch, warps))
            types = {"chosen": "*i32", "counts": "*i32", "real_rows": "*i32", "place": "*i64", "choice": "*i64"}
            types |= {"row_of": "*i64", "ends": "*i32", "rows": "i32", "blocks": "i32"}
            sizes = {"E": count, "WIDTH": count, "CHOSEN": 8, "BLOCK": block, "AT_ONCE": 4096 // count, "HEIGHT": 16}
            sizes["PADDED"] = True
            kernel = "lopa_dist.kernels.routing_triton:place_kernel"
            variants.append(Variant(kernel, types, sizes, tuple(types)[:7], arch, warps))
    types = {"x": "*bf16", "place": "*i64", "weights": "*fp32", "out": "*bf16"}
    sizes = {"CHOSEN": 8, "SIZE": 2048, "BLOCK": 1024}
    kernel = "lopa_dist.kernels.experts_triton:sum_kernel"
    options = {"num_warps": 4, "enable_fp_fusion": False}
    variants.append(Variant(kernel, types, sizes, tuple(types), arch, options))
    for one, found in zip(variants, compile_all(variants), strict=True):
        print(arch, one.kernel.split(":")[1], one.constexprs.get("BLOCK"), found.registers, found.stack, found.shared)
        assert found.stack <= 64, one
        assert found.shared <= 48 * 1024, one


def test_what_is_counted_is_what_runs() -> None:
    """The count itself: an operator and a kernel are two, a view is none."""
    count = Operations()
    with count:
        torch.ones(3).view(3, 1).t()
    count.kernel("norm")[(1,)](3)
    assert count.found == Counter({"ones": 1, "norm": 1}) + Counter()
