"""A whole forward of `gpu_first`, layer by layer: Triton's kernels against torch's forms, and against transformers.

What attention gives in every layer is compared, for it follows from all that came before it; then the records. The
weights are noise, and rows see all others, as in Qwen2 without its mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.first_facts import Fact, compared
from benchmarks.first_shapes import dtype_of, models
from benchmarks.gpu_model import qwen2, random_model, windows
from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.kv_pool import KVPool
from lopa_dist.engine.runners import FUSED, Runners
from lopa_dist.kernels.attention import AttentionKernel
from lopa_dist.kernels.sampling import Sampling
from lopa_dist.models.transformer import Transformer
from lopa_dist.rows.forward_batch import Predictions

BOUND = {torch.bfloat16: 0.03, torch.float32: 1e-4}  # of a layer: rounding, which adds up; a fault is of the order of 1
LEAST_EQUAL = 0.8  # of tokens: with weights that are noise, the two likeliest are often close
LAYERS = {"Dream-7B": 28, "LLaDA-8B": 4}  # that are made
ROWS = {"Dream-7B": (94, 520), "LLaDA-8B": (83,)}


@dataclass
class Forward:
    """What one way to compute gives."""

    layers: list[Tensor]  # [R, H * D] of every layer's attention
    tokens: Tensor  # [R] the likeliest, masks apart
    probabilities: Tensor  # [R] of these


class Watched:
    """An attention kernel that keeps what it gives."""

    def __init__(self, kernel: AttentionKernel, kept: list[Tensor]) -> None:
        self.kernel, self.kept, self.plan = kernel, kept, kernel.plan

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, plan: Any) -> Tensor:
        """As the kernel does."""
        result = self.kernel.attend(q, keys, values, plan)
        self.kept.append(result.flatten(1).clone())
        return result


def ours(model: Transformer, tokens: Tensor, options: EngineConfig) -> Forward:
    """Return what the eager path gives with these kernels."""
    rows, shape = len(tokens), model.config
    pool = KVPool(shape, 1, 16, model.head_weight.dtype, tokens.device)
    pool.allocate(0, 16)
    decode = DecodeConfig(verify="confidence", drafts=0, branches=0, block_size=rows, max_new_tokens=rows)
    runner = Runners(model, decode, options).make(pool, Sampling("probability"), 1, 16)
    kept: list[Tensor] = []
    runner.attention = Watched(runner.attention, kept)
    every = torch.arange(rows, device=tokens.device)
    batch = replace(
        windows(1, rows, 0, shape.mask_id, tokens.device), tokens=tokens,
        predict=lambda: Predictions(every, None), head_slots=every, head_sequence=np.zeros(rows, int), columns=rows,
    )  # fmt: skip
    records = runner.forward(runner.prepare(batch))[0]
    return Forward(kept, records[:, 0], records[:, 1].contiguous().view(torch.float32))


def transformers_form(model: Transformer, tokens: Tensor) -> Forward:
    """Return what transformers' Qwen2 gives with the same weights."""
    theirs = qwen2(model, tokens.device)
    kept: list[Tensor] = []
    for layer in theirs.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, given: kept.append(given[0][0].clone()))
    positions = torch.arange(len(tokens), device=tokens.device)[None]
    made = theirs(
        input_ids=tokens[None], position_ids=positions, use_cache=False, attention_mask={"full_attention": None}
    )
    logits = made.logits[0].float()
    logits[:, model.config.mask_id] = -torch.inf
    probabilities, best = logits.softmax(1).max(1)
    return Forward(kept, best, probabilities)


def against(one: Callable[[], Forward], other: Callable[[], Forward], bound: float) -> dict[str, Any]:
    """Compare two ways; say how far apart they are after every layer, and from which on they are too far."""
    found, wanted = one(), other()
    errors = [compared(mine, theirs, bound)["error"] for mine, theirs in zip(found.layers, wanted.layers, strict=True)]
    equal = float(found.tokens.eq(wanted.tokens).double().mean())
    apart = compared(found.probabilities[:, None], wanted.probabilities[:, None], bound)
    wrong = [layer for layer, error in enumerate(errors) if not error <= bound]
    place: dict[str, Any] = {}
    if wrong:
        place = {"first wrong layer": wrong[0]}
        place |= compared(found.layers[wrong[0]], wanted.layers[wrong[0]], bound)
    return place | {
        "ok": not wrong and apart["ok"] and equal >= LEAST_EQUAL,
        "layers": [float(f"{error:.3g}") for error in errors],
        "probabilities": apart["error"],
        "equal tokens": equal,
    }


def layers(device: torch.device) -> Iterator[Fact]:
    """Forwards of random models."""
    made: list[Transformer] = []
    attention = "meta"  # Triton's on a GPU; on a CPU the plain form of the same table

    def build(name: str) -> dict[str, Any]:
        for old in made:
            FUSED.pop(old, None)
        made.clear()
        shape = models(device)[name]
        made.append(random_model(replace(shape, layers=min(shape.layers, LAYERS[name])), device))
        made[0].to(dtype_of(device))
        return {"weights": sum(one.numel() for one in made[0].parameters())}

    def compare(with_: str, rows: int) -> dict[str, Any]:
        model = made[0]
        tokens = torch.randint(model.config.mask_id, (rows,), device=device)
        by_triton = partial(ours, model, tokens, EngineConfig(1, attention=attention, graphs="never"))
        by_torch = partial(ours, model, tokens, EngineConfig(1, kernels="torch"))
        other = by_torch if with_ == "torch" else partial(transformers_form, model, tokens)
        return against(by_triton, other, BOUND[dtype_of(device)])

    for name, sizes in ROWS.items():
        yield f"{name}: weights", partial(build, name)
        for rows in sizes:
            for with_ in ("torch", "transformers") if name == "Dream-7B" else ("torch",):
                yield f"{name}, {rows} rows, against {with_}", partial(compare, with_, rows)
