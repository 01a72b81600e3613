"""The GPU's benchmark without a GPU: its stages run as toys and claim nothing; floors, bars and the clock by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import gpu_bench, gpu_clock, gpu_kernels
from benchmarks.first_facts import perform
from benchmarks.gpu_bench import STAGES
from benchmarks.gpu_clock import Clock
from benchmarks.gpu_first import BENCH
from benchmarks.gpu_shapes import CPU, DREAM, LLADA, models, qwen2, random_model
from benchmarks.roofline import BF16, FP8, Bar, Case, Machine, floor_s, judged, step_bar

H200 = Machine(bandwidth=4.3e12, rate=7e14, fp8_rate=1.4e15)
A_BYTE, AN_OPERATION = Machine(1, math.inf, math.inf), Machine(math.inf, 1, 2)  # a second


def facts(stage: str, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    perform(STAGES[stage], CPU)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return {line["fact"]: line for line in lines if "fact" in line}


@pytest.fixture
def slow_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that always says 5 ms."""

    def clock(self: Clock, function: Callable[[], object], repeats: int = 0) -> float:
        function()
        return 5.0

    for name in ("queued", "graph", "wall"):
        monkeypatch.setattr(Clock, name, clock)


def varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, enable_gqa: bool = False
) -> Tensor:
    """What `varlen_attn` computes, which has no kernel for CPUs."""
    out, repeat = torch.empty_like(q), q.shape[1] // k.shape[1]
    for i in range(len(cu_q) - 1):
        rows, columns = slice(int(cu_q[i]), int(cu_q[i + 1])), slice(int(cu_k[i]), int(cu_k[i + 1]))
        assert rows.stop - rows.start <= max_q
        assert columns.stop - columns.start <= max_k
        keys, values = (x[columns].float().repeat_interleave(repeat, 1) for x in (k, v))
        scores = torch.einsum("rhd,chd->rhc", q[rows].float(), keys) * q.shape[2] ** -0.5
        out[rows] = torch.einsum("rhc,chd->rhd", scores.softmax(2), values).to(q.dtype)
    return out


@pytest.mark.parametrize(("stage", "least"), [("steps", 15), ("eager", 3), ("attention", 4), ("products", 6)])
def test_a_toy_of_every_stage_claims_nothing(stage: str, least: int, capsys: pytest.CaptureFixture[str]) -> None:
    found = facts(stage, capsys)
    assert len(found) >= least
    for name, fact in found.items():
        assert fact["ok"], fact
        assert "measured" not in fact
        assert "weights" in name or "fp8" in name or None in fact.values()


def test_the_stages_fit_into_ten_minutes() -> None:
    assert [stage.name for stage in BENCH] == ["environment", *STAGES]
    assert sum(stage.seconds for stage in BENCH) < 590


@pytest.mark.usefixtures("slow_clock")
def test_what_a_gpu_would_be_given(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    steps = facts("steps", capsys)
    assert steps["copy"]["copied TB/s"] == pytest.approx(4 * 65536 / 5e9)
    assert steps["bf16 product"]["measured"].startswith("bf16 TFLOP/s ")
    step = steps["Dream-7B bf16, prefix 64, 1 x 4 rows"]
    machine = Machine(1e12 * steps["copy"]["copied TB/s"], *2 * [1e12 * steps["bf16 product"]["bf16 TFLOP/s"]])
    floor = 1e3 * floor_s(models(CPU)["Dream-7B"], BF16, Case(64, 4, 1), machine)
    assert (step["ms"], step["floor ms"], step["x floor"]) == (5.0, pytest.approx(floor), pytest.approx(5 / floor))
    names = [name for name in steps if "prefix" in name]
    assert names[-2:] == [f"{model} bf16, prefix 64, 8 x 8 rows" for model in models(CPU)], "what has a bar comes first"

    (eager, *_) = [fact for name, fact in facts("eager", capsys).items() if "host" in name]
    assert (eager["ok"], eager["x eager"], eager["error"]) == (False, 1.0, "not x eager >= 4")
    for fact in facts("attention", capsys).values():
        assert fact["x best stock"] == fact["x padded SDPA"] == 1.0
        assert fact["varlen"] == fact["us a layer"] == 2500.0
    for name, fact in facts("products", capsys).items():
        assert "weights" in name or (fact["vgemm us"], fact["x library"], fact["ok"]) == (10_000.0, 1.0, True)


def test_dreams_floor_by_hand() -> None:
    case = Case(prefix=1024, window=32, branches=1)
    layers = 28 * (3584 * 4608 + 3584 * 3584 + 3 * 3584 * 18944)
    head = 152064 * 3584
    assert layers + head == 7_070_285_824
    assert floor_s(DREAM, BF16, case, H200) == pytest.approx(3.3e-3, rel=0.01)
    assert floor_s(DREAM, BF16, case, A_BYTE) == pytest.approx(14.14e9 + 57_344 * (1024 + 32), rel=1e-3)
    least = floor_s(DREAM, FP8, case, A_BYTE)
    assert least == pytest.approx(7.07e9 + 57_344 * 1056, rel=1e-3), "half of bf16's weights, the head's too"
    products, others = 2 * 32 * layers, 2 * 16 * head + 4 * 28 * 3584 * 32 * 1056
    assert floor_s(DREAM, BF16, case, AN_OPERATION) == products + others
    assert floor_s(DREAM, FP8, case, AN_OPERATION) == products / 2 + others


def test_branches_share_their_prefix() -> None:
    assert floor_s(DREAM, BF16, Case(1024, 96, 8), A_BYTE) == floor_s(DREAM, BF16, Case(1024, 768, 1), A_BYTE)
    without = 2 * (8.0e9 - 126464 * 4096)  # the embedding table
    assert floor_s(LLADA, BF16, Case(0, 32, 1), A_BYTE) == pytest.approx(without, rel=0.01)


@pytest.mark.parametrize(
    ("precision", "case", "limit"),
    [
        (BF16, Case(256, 96, 1), 1.25), (BF16, Case(256, 128, 1), None), (BF16, Case(2048, 64, 8), 1.35),
        (BF16, Case(256, 64, 4), None), (FP8, Case(256, 32, 1), 1.5), (FP8, Case(256, 96, 8), 1.5),
    ],
)  # fmt: skip
def test_a_steps_bar(precision: str, case: Case, limit: float | None) -> None:
    bar = step_bar(precision, case)
    assert (bar and bar.limit) == limit


def test_a_bar_is_met_missed_or_not_measured() -> None:
    slow, fast = Bar("x floor", 1.25), Bar("x eager", 4, at_most=False)
    figures = {"x floor": 1.25, "x eager": 3.9}
    told = {"ok": False, "error": "not x eager >= 4", "measured": "x floor 1.25, x eager 3.9"}
    assert judged(figures, slow, fast) == figures | told
    assert judged({"x floor": None, "x eager": 4.0}, slow, fast)["ok"]
    assert judged({"x floor": None}, slow) == {"x floor": None, "ok": True}


def test_transformers_gets_no_mask_and_sees_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    case, shape = Case(16, 8, 2), models(CPU)["Dream-7B"]
    written, plain = [], torch.nn.functional.scaled_dot_product_attention

    def spy(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        written.append((q.shape[2], k.shape[1:3], options["attn_mask"], options["is_causal"]))
        return plain(q, k, v, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    run = gpu_bench.eager_step(qwen2(random_model(shape, CPU), CPU), shape, case, CPU)
    with torch.inference_mode():
        first, second = run(), run()
    assert written == [(8, (shape.kv_heads, 24), None, False)] * 2 * shape.layers
    assert first.shape == (3, 2, 4)
    assert torch.equal(first, second), "the cache is as it was"


@pytest.mark.usefixtures("slow_clock")
@pytest.mark.parametrize("fault", ["raises", "differs"])
def test_a_library_that_fails_leaves_the_other_figures(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> Callable[[int], Tensor]:
        if fault == "raises":
            raise RuntimeError("no kernel for this GPU")
        return lambda layer: given[1] + 1

    monkeypatch.setattr(gpu_kernels, "by_branch", broken)
    found = gpu_kernels.compare(Clock(CPU), models(CPU)["LLaDA-8B"], gpu_kernels.Mix((4, 8), 2, 2))
    assert "varlen" not in found
    assert found["x padded SDPA"] == found["x best stock"] == 1.0
    assert ("no kernel" if fault == "raises" else "differs from meta-attention") in found["varlen failed"]


def test_the_median_of_the_runs_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now, spent = [0.0], [9.0, 9.0, 0.003, 0.001, 0.002]  # seconds; compiling and capturing first

    def pass_time(seconds: Callable[[], float]) -> None:
        now[0] += seconds()

    def mark(device: torch.device) -> SimpleNamespace:
        at = now[0]
        return SimpleNamespace(at=at, elapsed_time=lambda end: 1e3 * (end.at - at))

    monkeypatch.setattr(gpu_clock, "device_mark", mark)
    run, before = partial(pass_time, lambda: spent.pop(0)), partial(pass_time, lambda: 100.0)
    assert gpu_clock.median_ms(gpu_clock.graphed(run, CPU), CPU, 3, before) == pytest.approx(2.0)
    assert not spent
