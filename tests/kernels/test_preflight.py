"""Every kernel is launched once and compared; what is wrong is named with its remedy, and costs that kernel alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lopa_dist.kernels import (
    experts_triton,
    filters_triton,
    meta_attention,
    preflight,
    record_head_triton,
    rope_triton,
    routing_triton,
    rows_triton,
    virtual_gemm_triton,
)
from lopa_dist.kernels.dispatch import KERNELS, by_torch, fused
from lopa_dist.kernels.preflight import VARIANTS, Widths, explained, faults, refused

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTHS = Widths(
    hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16, tile_rows=8, experts=(torch.float32, torch.int8)
)
WHERE: dict[str, tuple[Any, str]] = {
    "attention": (preflight, "attend_meta"),
    "rotation": (rope_triton, "rope_and_store"),
    "norm": (rows_triton, "add_rms_norm"),
    "swiglu": (rows_triton, "swiglu"),
    "head": (record_head_triton, "share_sums"),
    "vgemm": (virtual_gemm_triton, "vgemm"),
    "experts": (experts_triton, "expert_linear"),
    "fp8": (rows_triton, "quantize_rows"),
}


def check(*kernels: str, dtype: torch.dtype = torch.float32, widths: Widths = WIDTHS) -> dict[str, preflight.Fault]:
    return faults(widths, dtype, DEVICE, kernels)


@pytest.mark.parametrize("dtype", preflight.TOLERANCE, ids=str)
def test_kernels_that_agree_have_no_fault(dtype: torch.dtype) -> None:
    wanted = {*KERNELS}
    if DEVICE.type == "cpu" and dtype != torch.float32:  # the interpreter has no int8 times bf16, and is slow
        eight_bits = {"vgemm", "experts"}
        wanted = eight_bits if dtype == torch.float16 else wanted - eight_bits
    assert check(*sorted(wanted), dtype=dtype) == {}


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [*((name, torch.float32) for name in VARIANTS), ("causal", torch.float16), ("causal", torch.bfloat16)],
    ids=str,
)
def test_variants_that_agree_have_no_fault(variant: str, dtype: torch.dtype) -> None:
    assert check(*VARIANTS[variant].kernels, dtype=dtype, widths=VARIANTS[variant].of(WIDTHS)) == {}


def test_the_variants_are_those_that_the_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of attention: rows with bounds, no splits where it is reproducible. Of the rotation: norms, places, fp16."""
    launched: list[dict[str, Any]] = []
    attend, rotate = preflight.attend_meta, rope_triton.rope_and_store

    def attended(q: Any, keys: Any, values: Any, plan: Any) -> Any:
        launched.append({"bounded": plan.bounded, "whole": plan.whole, "parts": plan.capacity.parts > 0})
        return attend(q, keys, values, plan)

    def rotated(*given: Any) -> Any:
        launched.append({"norms": given[7], "finite": given[9], "slots": given[10], "angles": given[1].dtype})
        return rotate(*given)

    monkeypatch.setattr(preflight, "attend_meta", attended)
    monkeypatch.setattr(rope_triton, "rope_and_store", rotated)
    assert check("attention", "rotation", dtype=torch.float16, widths=VARIANTS["causal"].of(WIDTHS)) == {}
    assert check("attention", widths=VARIANTS["causal, reproducible"].of(WIDTHS)) == {}
    assert check("rotation", dtype=torch.bfloat16, widths=VARIANTS["rotation in fp32"].of(WIDTHS)) == {}
    whole, split, rotation, reproducible, plain = launched
    assert (whole, split) == tuple({"bounded": True, "whole": True, "parts": parts} for parts in (False, True))
    launched.clear()
    assert check("attention") == {}
    assert [one["parts"] for one in launched] == [False, True], "low tiles are split, too"
    assert reproducible == {"bounded": True, "whole": False, "parts": False}
    assert all(rotation[name] is not None for name in ("norms", "finite", "slots"))
    assert plain == {"norms": None, "finite": None, "slots": None, "angles": torch.float32}


@pytest.mark.parametrize("name", ["sigmoids", "softmax"])
def test_a_choice_of_other_experts_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = routing_triton.routed
    monkeypatch.setattr(
        routing_triton, "routed", lambda logits, *given: right(torch.where(logits == logits.max(), 0, logits), *given)
    )
    assert "experts" in check("experts", widths=VARIANTS[name].of(WIDTHS))


def test_experts_that_padding_chooses_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = routing_triton.routed
    monkeypatch.setattr(routing_triton, "routed", lambda *given: right(*given[:4]))
    assert "experts" in check("experts", widths=VARIANTS["softmax"].of(WIDTHS))


@pytest.mark.parametrize("filters", [{"top_p": 1.0, "top_k": 0}, {"top_p": 1.0, "top_k": 1}], ids=["none", "best"])
def test_filters_that_keep_too_much_or_too_little_are_found(
    filters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = filters_triton.filtered_sums

    def wrong(logits: Any, mask_id: int, keys: Any, sampling: Any, *given: Any) -> Any:
        return right(logits, mask_id, keys, replace(sampling, **filters), *given)

    monkeypatch.setattr(filters_triton, "filtered_sums", wrong)
    assert [*check("head")] == ["head"]


@pytest.mark.parametrize("wrong", ["bounds", "places", "norms", "infinities"])
def test_a_fault_in_a_variant_is_found(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ignores what the variant is for."""
    attend, rotate = preflight.attend_meta, rope_triton.rope_and_store

    def attended(q: Any, keys: Any, values: Any, plan: Any) -> Any:
        plan.seen.fill_(preflight.CACHED)
        return attend(q, keys, values, plan)

    def rotated(*given: Any) -> Any:
        without = {"norms": 7, "infinities": 9, "places": 10}[wrong]
        return rotate(*(None if number == without else one for number, one in enumerate(given)))

    if wrong == "bounds":
        monkeypatch.setattr(preflight, "attend_meta", attended)
    else:
        monkeypatch.setattr(rope_triton, "rope_and_store", rotated)
    widths = VARIANTS["causal"].of(WIDTHS)
    assert [*check("attention", "rotation", dtype=torch.float16, widths=widths)] == [
        "attention" if wrong == "bounds" else "rotation"
    ]


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_wrong_number_is_a_fault(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name = WHERE[kernel]
    right: Callable[..., Any] = getattr(module, name)

    def wrong(*given: Any, **named: Any) -> Any:
        made = right(*given, **named)
        first = made[0] if isinstance(made, tuple) else made
        spoilt = first[0] if kernel == "head" else first  # the greatest logits
        spoilt.view(-1)[21] = (spoilt.view(-1)[21].float() * 2 + 7).to(spoilt.dtype)  # a GPU does not multiply in fp8
        return made

    monkeypatch.setattr(module, name, wrong)
    fault = check(kernel)[kernel]
    assert "wrong numbers" in fault.what
    assert "report" in fault.remedy


def raises(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def test_a_kernel_that_does_not_compile_is_replaced_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refused.cache_clear()
    error = RuntimeError("at 4:20:\n  x = tl.dot(a, b)\nPassManager::run failed")
    monkeypatch.setattr(rows_triton, "swiglu", raises(error))
    monkeypatch.setattr(rows_triton, "add_rms_norm", raises(error))
    caplog.set_level(logging.INFO)
    wanted = ("norm", "swiglu", "rotation")
    for _ in range(2):
        assert refused(WIDTHS, torch.float32, DEVICE, wanted) == {"norm", "swiglu"}
    refused.cache_clear()
    began, said = [record.getMessage() for record in caplog.records]
    assert began.startswith("checking 3 Triton kernels on this GPU")
    assert said.startswith("WARNING: slower without Triton: norm, swiglu. RuntimeError: at 4:20: / PassManager")
    assert "engine.kernels=torch" in said


def test_without_a_compiler_the_remedy_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_triton, "swiglu", raises(RuntimeError("Failed to find C compiler.")))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(preflight.shutil, "which", lambda name: None)
    fault = check("swiglu")["swiglu"]
    assert "there is no C compiler" in fault.what
    assert "apt install gcc" in fault.remedy
    monkeypatch.setenv("CC", "icc")
    assert explained(RuntimeError()).what == "CC=icc is not there"


def test_without_python_h_the_remedy_is_the_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(preflight.shutil, "which", lambda name: "/usr/bin/gcc")
    monkeypatch.setattr(preflight.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    fault = explained(RuntimeError("Command '['/usr/bin/gcc', ...]' returned non-zero exit status 1."))
    assert str(tmp_path / "Python.h") in fault.what
    assert "-dev" in fault.remedy
    (tmp_path / "Python.h").touch()
    assert "exit status 1" in explained(RuntimeError("... non-zero exit status 1.")).what


def test_without_triton_nothing_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "TRITON", False)
    monkeypatch.setattr(rows_triton, "swiglu", raises(AssertionError("launched")))
    assert check("swiglu")["swiglu"].remedy == "pip install triton"


def test_a_gpu_that_is_lost_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", raises(RuntimeError("an illegal memory access was encountered")))
    gpu = torch.device("cuda:0")
    with pytest.raises(RuntimeError, match=r"Triton's kernel head made the GPU unusable.*engine\.kernels=torch"):
        preflight.check_alive("head", gpu, RuntimeError("CUDA error"))


def test_memory_that_is_short_is_no_fault_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta_attention, "attend_meta", None)
    monkeypatch.setattr(preflight, "attend_meta", raises(torch.OutOfMemoryError("out of memory")))
    with pytest.raises(torch.OutOfMemoryError):
        check("attention")


class OnGpu:
    """A tensor of which only the place is asked."""

    is_cuda, requires_grad = True, False


def test_a_kernel_can_be_turned_off_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lopa_dist.kernels.dispatch.TRITON", True)
    x: Any = OnGpu()
    assert fused(x, "norm")
    with by_torch(frozenset({"norm"})):
        assert not fused(x, "norm")
        assert fused(x, "swiglu")
    assert fused(x, "norm")


def test_a_token_is_right_or_wrong() -> None:
    """Numbers may differ a little, tokens may not: a token 8 off is another one."""
    tokens = torch.arange(500, dtype=torch.int32)

    def trial(*_: Any) -> Any:
        yield tokens + 8 * (tokens == 499), tokens

    found = preflight.difference(trial, WIDTHS, torch.bfloat16, DEVICE)
    assert found is not None
    assert "507 where torch has 499" in found
