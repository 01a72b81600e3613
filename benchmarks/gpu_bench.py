"""The stages of ``python -m benchmarks.gpu_first --bench``: how close a forward comes to what this GPU can do.

The weights are random, in the shapes of Dream-7B and LLaDA-8B; one model is in memory at a time.

- steps: the rates at which the GPU copies, reads and multiplies. Then the times of forwards, by prefix, window,
  branches and precision, compared with the floors that follow from these rates (`roofline`). A forward consists of the
  static runner's two CUDA graphs: transformer and record head. Forwards that have a bar come first.
- eager: the static runner's forward with everything that the host prepares for it, from tokens on the device to
  records, compared with transformers' Qwen2. Qwen2 has the same weights, and goes from the same tokens to the same
  records (token, probability, entropy) of the same positions. Its batch rows are the branches, each with a copy of the
  prefix, and all rows of a branch see each other. There is no attention mask, so that torch can choose FlashAttention
  with grouped heads. Neither program decodes.
- attention, products: see `gpu_kernels`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.first_facts import Fact, Making, StageOf, main
from benchmarks.gpu_clock import Clock
from benchmarks.gpu_kernels import attention, products
from benchmarks.gpu_shapes import GRAPHS, Weights, has_fp8, models, qwen2, runner_of, windows
from benchmarks.roofline import BF16, FP8, Bar, Case, Machine, floor_s, judged, ratio, step_bar
from lopa_dist.engine.buckets import bucket
from lopa_dist.engine.static_runner import StaticRunner
from lopa_dist.kernels.quantized import FP8 as FP8_DTYPE
from lopa_dist.models.config import ModelConfig
from lopa_dist.models.transformer import Transformer

CASES = [Case(*sizes) for sizes in product((1024, 256, 2048), (32, 64, 96), (1, 2, 4, 8))]
EAGER = (Case(1024, 32, 1), Case(1024, 96, 1), Case(1024, 64, 8))
TOY_CASES = (Case(64, 4, 1), Case(64, 8, 8))


def rates(clock: Clock, measured: dict[str, float | None]) -> Iterator[Fact]:
    """Yield the rates of large copies, reads and products in this version of torch; also put them into `measured`.

    The units are terabytes and tera-operations per second.
    """
    size, side = (1 << 30, 8192) if clock.gpu else (1 << 16, 64)
    empty = partial(torch.empty, dtype=torch.bfloat16, device=clock.device)

    def rate(name: str, amount: float, run: Callable[[], object]) -> dict[str, Any]:
        measured[name] = ratio(amount / 1e9, clock.queued(run))
        return judged({name: measured[name]})

    def copy() -> dict[str, Any]:
        source = empty(size).fill_(1)
        target = torch.empty_like(source)
        return rate("copied TB/s", 4 * size, lambda: target.copy_(source))

    def read() -> dict[str, Any]:
        return rate("read TB/s", 2 * size, empty(size).fill_(1).amax)

    def bf16() -> dict[str, Any]:
        x, w = (empty(side, side).normal_() for _ in range(2))
        return rate("bf16 TFLOP/s", 2.0 * side**3, lambda: F.linear(x, w))

    def fp8() -> dict[str, Any]:
        x, w = (empty(side, side).normal_().to(FP8_DTYPE) for _ in range(2))
        one = torch.ones(side, device=clock.device)
        multiply = partial(torch._scaled_mm, out_dtype=torch.bfloat16, use_fast_accum=True)
        return rate("fp8 TFLOP/s", 2.0 * side**3, lambda: multiply(x, w.t(), one[:, None], one[None]))

    yield from (("copy", Making(copy)), ("read", Making(read)), ("bf16 product", Making(bf16)))
    if clock.gpu and has_fp8(clock.device):
        yield "fp8 product", Making(fp8)


def machine_of(measured: dict[str, float | None]) -> Machine | None:
    """Return a machine with the `measured` rates; None if they were not measured."""
    bandwidth = max(measured.get("copied TB/s") or 0.0, measured.get("read TB/s") or 0.0)
    rate = measured.get("bf16 TFLOP/s")
    if not (bandwidth and rate):
        return None
    return Machine(1e12 * bandwidth, 1e12 * rate, 1e12 * (measured.get("fp8 TFLOP/s") or rate))


def steps(device: torch.device) -> Iterator[Fact]:
    """Yield the times of forwards compared with their floors; forwards that have a bar come first."""
    clock, weights, measured = Clock(device), Weights(device), dict[str, float | None]()
    cases = CASES if clock.gpu else TOY_CASES
    yield from rates(clock, measured)

    def forward(name: str, precision: str, case: Case) -> dict[str, Any]:
        milliseconds = forward_ms(clock, weights.model, case)
        machine = machine_of(measured)
        floor = None if machine is None else 1e3 * floor_s(models(device)[name], precision, case, machine)
        bar = step_bar(precision, case)
        figures = {"ms": milliseconds, "floor ms": floor, "x floor": ratio(milliseconds, floor)}
        return judged(figures, *([bar] if bar else []))

    def facts(name: str, precision: str, with_bar: bool) -> Iterator[Fact]:
        for case in cases:
            if (step_bar(precision, case) is not None) == with_bar:
                yield f"{name} {precision}, {case}", partial(forward, name, precision, case)

    for name, shape in models(device).items():
        yield f"{name}: weights", Making(partial(weights.make, shape))
        yield from facts(name, BF16, True)
        if has_fp8(device):
            yield f"{name}: in fp8", Making(weights.to_fp8)
            yield from facts(name, FP8, True)
    for name, shape in models(device).items():
        yield f"{name}: weights again", Making(partial(weights.make, shape))
        yield from facts(name, BF16, False)


def forward_ms(clock: Clock, model: Transformer, case: Case) -> float | None:
    """Return the milliseconds of a forward's two graphs; None on a CPU."""
    runner = runner_of(model, case.branches, case.window, case.prefix, GRAPHS)
    assert isinstance(runner, StaticRunner)
    batch = windows(case.branches, case.window, case.prefix, model.config.mask_id, clock.device)
    runner.forward(runner.prepare(batch))
    body, head = runner.bodies[bucket(len(batch.tokens)) or 0], runner.heads[bucket(len(batch.heads.slots)) or 0]

    def graphs() -> None:
        body.replay(partial(body.run, runner), clock.device, runner.memory)
        head.replay(partial(head.run, runner), clock.device, runner.memory)

    return clock.queued(graphs)


def eager(device: torch.device) -> Iterator[Fact]:
    """Yield comparisons of Dream-7B's forward with the one of transformers' Qwen2."""
    clock, weights, theirs = Clock(device), Weights(device), list[Any]()

    def both() -> dict[str, Any]:
        facts = weights.make(models(device)["Dream-7B"])
        theirs.append(qwen2(weights.model, device))
        return facts

    def compare(case: Case) -> dict[str, Any]:
        model = weights.model
        runner = runner_of(model, case.branches, case.window, case.prefix, GRAPHS)
        batch = windows(case.branches, case.window, case.prefix, model.config.mask_id, device)
        ours = clock.wall(lambda: runner.forward(runner.prepare(batch)))
        other = clock.wall(eager_step(theirs[0], model.config, case, device))
        return judged({"ms": ours, "eager ms": other, "x eager": ratio(other, ours)}, Bar("x eager", 4, False))

    yield "weights", Making(both)
    for case in EAGER if clock.gpu else TOY_CASES:
        yield f"Dream-7B bf16, {case}, host included", partial(compare, case)


def eager_step(model: Any, shape: ModelConfig, case: Case, device: torch.device) -> Callable[[], Tensor]:
    """Return a function that runs a forward as plain code would.

    Branches are batch rows. The forward computes the logits of every second position, and their records.
    """
    from transformers import DynamicCache

    cache = DynamicCache()
    for layer in range(shape.layers):
        k, v = (
            torch.empty(case.branches, shape.kv_heads, case.prefix, shape.head_dim, dtype=torch.bfloat16, device=device)
            for _ in range(2)
        )
        cache.update(k.normal_(), v.normal_(), layer)
    tokens = torch.full((case.branches, case.window), shape.mask_id, device=device)
    positions = (case.prefix + torch.arange(case.window, device=device)).expand(case.branches, -1)
    predicted = torch.arange(0, case.window, 2, device=device)

    def run() -> Tensor:
        output = model(
            input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=predicted,
            attention_mask={"full_attention": None},  # no mask: with one, torch could not use FlashAttention
        )  # fmt: skip
        cache.crop(-case.window)
        probabilities = output.logits.float().softmax(-1)
        confidence, token = probabilities.max(-1)
        entropy = (probabilities * (probabilities + 1e-10).log()).sum(-1)
        return torch.stack([token.float(), confidence, entropy])

    return run


STAGES: dict[str, StageOf] = {"steps": steps, "attention": attention, "eager": eager, "products": products}

if __name__ == "__main__":
    main(STAGES)
