"""Check whole texts of small engines for `gpu_first`, with models and ways of decoding that the default does not use.

The models' weights are random, of a scale at which texts depend on everything that rows see. The device's texts are
compared with those of the CPU in fp32. Where texts are promised to be reproducible, texts of different batches must be
equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.first_facts import Fact
from benchmarks.first_texts import agreement
from benchmarks.gpu_shapes import CPU, GRAPHS
from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.forecast import Choice
from lopa_dist.engine.lookahead import LookaheadPolicy
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.request import Request, request_key
from lopa_dist.engine.static_runner import StaticRunner
from lopa_dist.models.config import Experts, ModelConfig
from lopa_dist.models.quantize import quantize
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Solo

MASKED = ModelConfig(
    family="Dream", vocab_size=256, hidden_size=64, layers=2, heads=32, kv_heads=8, head_dim=16, intermediate_size=96,
    rms_eps=1e-6, rope_theta=1e4, qkv_bias=False, tied=False, shift=True, mask_id=255, eos_ids=(254,), pad_id=254,
    max_positions=4096,
)  # fmt: skip
CAUSAL = replace(MASKED, family="idlm")  # with as many heads as Qwen3-8B
MODELS = {
    "masked": MASKED,
    "causal": CAUSAL,
    "norms of heads": replace(CAUSAL, qk_norm=True),
    "router of sigmoids": replace(MASKED, experts=Experts(16, 4, 32, "grouped_sigmoid", True, 2.5, 4, 2, 32)),
    "router of softmax": replace(MASKED, experts=Experts(16, 4, 32, "softmax", True)),
}
SCALE = 0.15  # standard deviation of the weights: a layer's outputs are about as large as its inputs
TOKENS = 24  # tokens of an answer
# Least share of equal tokens. In unrelated texts, less than one token in a hundred is equal. In bf16 (for mixtures of
# experts, on `MIXED` prompts) the share in correct texts is 0.39 to 0.90 on a CPU, because rounding may choose another
# expert. In texts computed with the wrong experts, the share is 0.07 to 0.22.
LEAST = {torch.float32: 0.95, torch.bfloat16: 0.3}
MIXED = 12
MANY = Choice(
    16, 17
)  # masks and groups that auto chooses for one sequence, where a step's time hardly depends on its rows

ALONE = DecodeConfig(context="causal", branches=0, drafts=0, max_new_tokens=TOKENS, stop_at_eos=False)
FIXED = replace(ALONE, drafts=4)
BLOCKS = DecodeConfig(context="blocks", block_size=8, max_new_tokens=TOKENS, stop_at_eos=False)
WINDOWS = DecodeConfig(context="d2f", block_size=8, max_new_tokens=TOKENS, stop_at_eos=False)
SAMPLED: dict[str, Any] = {"temperature": 0.8}


def model_of(name: str, device: torch.device, dtype: torch.dtype = torch.float32, kind: str = "none") -> Transformer:
    """Return the model `name` of `MODELS`, with the same weights on every device; `kind` names the quantisation."""
    model, draw = Transformer(MODELS[name]), torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        parameter.data.normal_(0, SCALE, generator=draw) if parameter.dim() > 1 else parameter.data.fill_(1)
    model = model.requires_grad_(False).eval().to(device, dtype)
    if kind != "none":
        quantize(model, kind)
    return model


def requests_of(prompts: int, length: int, samples: int = 1) -> list[Request]:
    """Return requests with `prompts` random prompts of `length` tokens, and `samples` requests for each prompt."""
    draw = torch.Generator().manual_seed(length)
    texts = torch.randint(250, (prompts, length), generator=draw).tolist()
    return [
        Request(index, text, TOKENS, request_key(0, str(index)), prefix=length * (samples > 1))
        for index, text in enumerate(text for text in texts for _ in range(samples))
    ]


def answers(
    model: Transformer, decode: DecodeConfig, requests: Sequence[Request], options: EngineConfig
) -> tuple[list[list[int]], bool]:
    """Return the answers in the order of the requests, and whether the steps ran as they should on a GPU.

    That is the case if the static runner ran them, and no capture failed.
    """
    engine = Engine(model, decode, Solo(), options)
    made = sorted(engine.generate(requests), key=lambda one: one.request.index)
    assert engine.batch is not None
    runner = engine.batch.runner
    fixed = isinstance(runner, StaticRunner) and not runner.uncaptured
    if fixed and isinstance(runner, StaticRunner) and runner.device.type == "cuda":
        fixed = any(body.replay.graph is not None for body in runner.bodies.values())
    return [one.tokens for one in made], fixed


def against_the_cpu(
    device: torch.device,
    known: dict[str, list[list[int]]],
    name: str,
    decode: DecodeConfig,
    requests: Sequence[Request],
    choice: Choice | None = None,
    dtype: torch.dtype = torch.float32,
    plain: DecodeConfig | None = None,
    options: EngineConfig = GRAPHS,
) -> dict[str, Any]:
    """Compare a device's texts, which graphs compute, with texts from the CPU's eager path.

    Args:
        device: the device to check.
        known: answers of the CPU that are known already; new ones are added.
        name: the model's name in `MODELS`.
        decode: how the device decodes.
        requests: the requests, all in flight at once.
        choice: what auto chooses in every step; None: auto chooses freely.
        dtype: the model's precision on the device.
        plain: how the CPU decodes; None: as the device does.
        options: how the device runs the model; the CPU prefills in chunks as it does.
    """
    cpu = EngineConfig(len(requests), prefill_chunk=options.prefill_chunk)
    key = f"{name}, {plain or decode}, {len(requests)} prompts of {len(requests[0].prompt)}, {cpu}"
    if key not in known:
        known[key], _ = answers(model_of(name, CPU), plain or decode, requests, cpu)
    wanted = known[key]
    around: AbstractContextManager[Any] = nullcontext()
    if choice is not None:
        around = patch.object(LookaheadPolicy, "propose", lambda *_: choice)
    with around:
        found, fixed = answers(
            model_of(name, device, dtype), decode, requests, replace(options, max_sequences=len(requests))
        )
    equal = agreement(wanted, found)
    return {"ok": equal >= LEAST[dtype] and fixed, "equal": equal, "bound": LEAST[dtype], "graphs": fixed}


def by_batch(
    device: torch.device, name: str, decode: DecodeConfig, requests: Sequence[Request], kind: str = "none"
) -> dict[str, Any]:
    """Compare the texts of `requests` in batches of 1, 5 and 16 sequences, with `reproducible` set."""
    model = model_of(name, device, torch.bfloat16 if device.type == "cuda" else torch.float32, kind)
    sizes = (1, 5, 16)
    ways = [answers(model, decode, requests, replace(GRAPHS, max_sequences=size, reproducible=True)) for size in sizes]
    equal = [texts == ways[0][0] for texts, _ in ways]
    return {"ok": all(equal) and all(fixed for _, fixed in ways), "sequences": sizes, "equal": equal}


def engines(device: torch.device) -> Iterator[Fact]:
    """Yield the facts about texts of small engines."""
    auto, tree = replace(ALONE, drafts="auto"), replace(FIXED, branches=3)
    few = requests_of(3, 40)
    compare: Callable[..., Callable[[], dict[str, Any]]] = partial(partial, against_the_cpu, device, {})
    for length in (300, 1500):
        alone = requests_of(1, length)
        yield f"causal, 4 drafts, a prompt of {length}", compare("causal", FIXED, alone, plain=ALONE)
        yield f"causal, auto, a prompt of {length}", compare("causal", auto, alone, MANY, plain=ALONE)
        yield f"causal, branches, a prompt of {length}", compare("causal", tree, alone, plain=ALONE)
    yield "causal, auto by itself", compare("causal", auto, few, plain=ALONE)
    yield "causal, norms of heads", compare("norms of heads", FIXED, few, plain=ALONE)
    for name in ("router of sigmoids", "router of softmax"):
        yield name, compare(name, BLOCKS, few)
        if device.type == "cuda":  # on a CPU, rounding in bf16 would differ between machines
            yield f"{name}, bf16", compare(name, BLOCKS, requests_of(MIXED, 40), dtype=torch.bfloat16)
    chunks, shared = replace(GRAPHS, prefill_chunk=16), [replace(one, prefix=32) for one in few]
    for name, decode in (("causal", FIXED), ("masked", BLOCKS)):
        filtered = replace(decode, top_p=0.9, **SAMPLED)
        yield f"{name}, top-p after chunks of a prompt", compare(name, filtered, shared, options=chunks)
    for name, decode in (("masked", WINDOWS), ("causal", FIXED)):
        yield f"{name}, top-p", compare(name, replace(decode, top_p=0.9, **SAMPLED), few)
        samples = requests_of(4, 40, samples=3)
        yield (
            f"{name}, reproducible, three samples",
            partial(by_batch, device, name, replace(decode, **SAMPLED), samples),
        )
        yield f"{name}, reproducible, int8", partial(by_batch, device, name, decode, few, "int8")
