"""Check a whole forward for `gpu_first`, layer by layer: Triton's kernels against torch's forms and transformers.

The attention's output in every layer is compared, since it depends on everything before it, and then the records. The
weights are random, and each row sees all others, as in Qwen2 without its mask. Rounding errors grow from layer to
layer. How large they may be follows from the difference between two correct ways: torch's forms and transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.first_facts import Fact, Making, compared
from benchmarks.gpu_shapes import Weights, dtype_of, models, qwen2, runner_of, windows
from lopa_dist.engine.config import EngineConfig
from lopa_dist.kernels.attention import AttentionKernel
from lopa_dist.kernels.sampling import Sampling
from lopa_dist.models.transformer import Transformer

BOUND = {torch.bfloat16: 0.03, torch.float32: 1e-4}  # a layer's error may always be this large; a fault's is about 1
MORE = 2.0  # a layer's error may also be this many times as large as the difference between two other ways
LEAST_EQUAL = 0.8  # least share of equal tokens: with random weights, the two likeliest tokens are often close
LAYERS = {"Dream-7B": 28, "LLaDA-8B": 4}  # most layers of each model
ROWS = {"Dream-7B": (94, 520), "LLaDA-8B": (83,)}


@dataclass
class Forward:
    """The results of a forward that was computed in one way."""

    layers: list[Tensor]  # [R, H * D] the attention's output in each layer
    tokens: Tensor  # [R] the likeliest tokens, the mask apart
    probabilities: Tensor  # [R] the probabilities of these tokens


class Watched:
    """An attention kernel that appends its results to `results`."""

    def __init__(self, kernel: AttentionKernel, results: list[Tensor]) -> None:
        self.kernel, self.results, self.plan = kernel, results, kernel.plan

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, plan: Any) -> Tensor:
        """Return what the kernel computes, and keep a copy."""
        result = self.kernel.attend(q, keys, values, plan)
        self.results.append(result.flatten(1).clone())
        return result


def ours(model: Transformer, tokens: Tensor, options: EngineConfig) -> Forward:
    """Return the forward of the eager path, with the kernels that `options` choose."""
    rows, shape = len(tokens), model.config
    runner = runner_of(model, 1, rows, 16, options, Sampling("probability"))
    results: list[Tensor] = []
    runner.attention = Watched(runner.attention, results)
    batch = replace(windows(1, rows, 0, shape.mask_id, tokens.device, every=1), tokens=tokens)
    records = runner.forward(runner.prepare(batch))[0]
    return Forward(results, records[:, 0], records[:, 1].contiguous().view(torch.float32))


def transformers_form(model: Transformer, tokens: Tensor) -> Forward:
    """Return the forward of transformers' Qwen2 with the same weights."""
    theirs = qwen2(model, tokens.device)
    results: list[Tensor] = []
    for layer in theirs.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, given: results.append(given[0][0].clone()))
    positions = torch.arange(len(tokens), device=tokens.device)[None]
    output = theirs(
        input_ids=tokens[None], position_ids=positions, use_cache=False, attention_mask={"full_attention": None}
    )
    logits = output.logits[0].float()
    logits[:, model.config.mask_id] = -torch.inf
    probabilities, best = logits.softmax(1).max(1)
    return Forward(results, best, probabilities)


def apart(way: Forward, other: Forward) -> list[float]:
    """Return the relative differences between two forwards: in every layer's attention, then in the probabilities."""
    ways = [[*one.layers, one.probabilities[:, None]] for one in (way, other)]
    return [compared(mine, theirs, 0)["error"] for mine, theirs in zip(*ways, strict=True)]


def against(
    way: Callable[[], Forward],
    other: Callable[[], Forward],
    bound: float,
    third: Callable[[], Forward] | None = None,
) -> dict[str, Any]:
    """Compare two ways to compute a forward; say how much they differ in every layer, and which wrong layer is first.

    Args:
        way: computes the forward to check.
        other: computes the forward to compare it with.
        bound: a difference (a relative norm) may always be this large.
        third: another correct way; `way` may differ from `other` by `MORE` times as much as this one does.
    """
    found, wanted = way(), other()
    bounds = [bound] * (len(found.layers) + 1)
    if third is not None:
        bounds = [max(bound, MORE * error) for error in apart(third(), wanted)]
    *errors, of_probabilities = apart(found, wanted)
    equal = float(found.tokens.eq(wanted.tokens).double().mean())
    wrong = [layer for layer, error in enumerate(errors) if not error <= bounds[layer]]
    first: dict[str, Any] = {}
    if wrong:
        first = {"first wrong layer": wrong[0]} | compared(
            found.layers[wrong[0]], wanted.layers[wrong[0]], bounds[wrong[0]]
        )
    return first | {
        "ok": not wrong and of_probabilities <= bounds[-1] and equal >= LEAST_EQUAL,
        "layers": [float(f"{error:.3g}") for error in errors],
        "bounds": [float(f"{one:.3g}") for one in bounds],
        "probabilities": of_probabilities,
        "equal tokens": equal,
    }


def layers(device: torch.device) -> Iterator[Fact]:
    """Yield the facts about forwards of random models."""
    weights, dtype = Weights(device), dtype_of(device)

    def compare(with_: str, rows: int) -> dict[str, Any]:
        model = weights.model
        tokens = torch.randint(model.config.mask_id, (rows,), device=device)
        # on a GPU, Triton's attention; on a CPU, the plain form over the same table of tiles
        by_triton = partial(ours, model, tokens, EngineConfig(1, attention="meta", graphs="never"))
        by_torch = partial(ours, model, tokens, EngineConfig(1, kernels="torch"))
        if not model.config.qkv_bias:  # Qwen2 has biases; with few layers, `bound` alone is enough
            return against(by_triton, by_torch, BOUND[dtype])
        theirs = partial(transformers_form, model, tokens)
        other, third = (by_torch, theirs) if with_ == "torch" else (theirs, by_torch)
        return against(by_triton, other, BOUND[dtype], third)

    for name, sizes in ROWS.items():
        shape = models(device)[name]
        shape = replace(shape, layers=min(shape.layers, LAYERS[name]))
        yield f"{name}: weights", Making(partial(weights.make, shape, dtype))
        for rows in sizes:
            for with_ in ("torch", "transformers") if name == "Dream-7B" else ("torch",):
                yield f"{name}, {rows} rows, against {with_}", partial(compare, with_, rows)
