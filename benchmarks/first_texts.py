"""Check texts of the embedded model for `gpu_first`: the device computes them in several ways, the CPU in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from itertools import islice
from typing import Any

import torch

from benchmarks.first_facts import Fact
from benchmarks.gpu_shapes import CPU, has_fp8
from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.request import Request
from lopa_dist.models.checkpoint import load_model
from lopa_dist.models.files import EMBEDDED
from lopa_dist.models.tokenizer import load_tokenizer
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Communicator, Solo
from lopa_dist.tasks.word_problems import problems

DECODING: dict[str, Any] = {"context": "d2f", "block_size": 16, "max_new_tokens": 64}
LOOKAHEAD = DecodeConfig(branches=7, verify="confidence", drafts=0, **DECODING)
DECODINGS = {
    "verified": DecodeConfig(**DECODING),
    "LoPA k=7": LOOKAHEAD,
    "temperature 0.8": DecodeConfig(temperature=0.8, **DECODING),
}
GRAPHS = EngineConfig(4, attention="meta", graphs="always")  # the path that a GPU runs
WAYS: dict[str, tuple[torch.dtype, EngineConfig, str, float]] = {
    "fp32": (torch.float32, GRAPHS, "none", 0.97),
    "fp32 eager": (torch.float32, EngineConfig(attention="meta", graphs="never"), "none", 0.97),
    "fp32 torch": (torch.float32, EngineConfig(kernels="torch"), "none", 0.97),
    "bf16": (torch.bfloat16, GRAPHS, "none", 0.75),  # in correct texts, the share is 0.84 to 0.90 on a CPU
    "int8": (torch.float32, GRAPHS, "int8", 0.6),
    "fp8": (torch.bfloat16, GRAPHS, "fp8", 0.6),
}
"""For each way: precision, engine, quantisation, and the least share of equal tokens."""


def count_on(device: torch.device) -> int:
    """Return how many problems are solved on a device."""
    return 8 if device.type == "cuda" else 2


def tokens_of(
    model: Transformer, options: EngineConfig, decode: DecodeConfig, count: int, comm: Communicator | None = None
) -> list[list[int]]:
    """Return the answers to the first `count` held-out word problems, which the embedded model was trained to solve."""
    tokenizer = load_tokenizer(EMBEDDED)
    requests = []
    for i, problem in enumerate(islice(problems("held_out", 1), count)):
        chat = [{"role": "user", "content": problem.question}]
        text = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        ids = tokenizer(text, add_special_tokens=False).input_ids
        requests.append(Request(i, ids, decode.max_new_tokens, 77 + i))
    generations = Engine(model, decode, comm or Solo(), options).generate(requests)
    return [generation.tokens for generation in sorted(generations, key=lambda one: one.request.index)]


def agreement(answers: list[list[int]], others: list[list[int]]) -> float:
    """Return the share of positions with the same token; where only one of two answers has a token, they differ."""
    pairs = list(zip(answers, others, strict=True))
    same = sum(a == b for answer, other in pairs for a, b in zip(answer, other, strict=False))
    return same / max(1, sum(max(len(answer), len(other)) for answer, other in pairs))


def texts(device: torch.device) -> Iterator[Fact]:
    """Yield the facts about the device's texts: compared with the CPU's, and reproducible in any batch."""
    gpu = device.type == "cuda"
    count = 2 * count_on(device) if gpu else count_on(device)

    @cache
    def on_cpu(name: str) -> list[list[int]]:
        return tokens_of(load_model(EMBEDDED, torch.float32, CPU), EngineConfig(), DECODINGS[name], count)

    def check(name: str, way: str) -> dict[str, Any]:
        dtype, options, quantization, bound = WAYS[way]
        model = load_model(EMBEDDED, dtype, device, quantization=quantization)
        equal = agreement(on_cpu(name), tokens_of(model, options, DECODINGS[name], count))
        return {"ok": equal >= bound, "equal": equal, "bound": bound, "tokens": sum(map(len, on_cpu(name)))}

    def reproducible() -> dict[str, Any]:
        model = load_model(EMBEDDED, torch.bfloat16 if gpu else torch.float32, device)
        answers = {
            sequences: tokens_of(model, EngineConfig(sequences, reproducible=True), LOOKAHEAD, count)
            for sequences in ((1, 5, count) if gpu else (1, count))
        }
        equal = [texts == answers[count] for texts in answers.values()]
        return {"ok": all(equal), "sequences": list(answers), "equal": equal}

    for name in DECODINGS:
        for way in WAYS:
            # on a CPU the other ways prove nothing, because their bits differ between machines
            if way == "fp32" or (gpu and (way != "fp8" or has_fp8(device))):
                yield f"{name}, {way}", partial(check, name, way)
    yield "reproducible, by sequences at a time", reproducible
