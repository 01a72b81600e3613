"""The engine on a GPU: graphs against the eager path, and how often the host waits for the device."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from itertools import zip_longest

import pytest
import torch

from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.request import Request, request_key
from lopa_dist.engine.static_runner import StaticRunner
from lopa_dist.models.config import QUANTIZATIONS
from lopa_dist.models.quantize import quantize
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Solo
from lopa_dist.tasks.word_problems import problems

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: make test-gpu"),
]

CONFIG = DecodeConfig(verify="confidence", drafts=0, branches=3, block_size=16, max_new_tokens=64)
Texts = dict[int, list[int]]
LEAST = {torch.float32: 0.97, torch.bfloat16: 0.75}
"""Tokens that two right ways to compute have in common at least.

On a CPU, roundings of bf16 change one in twenty, those of fp8 one in thirteen; a rotation by other angles, every other.
"""


@pytest.fixture(scope="module")
def requests(embedded_tokenizer) -> list[Request]:
    render = embedded_tokenizer.apply_chat_template
    made = []
    for i, (problem, _) in enumerate(zip(problems("held_out", 1), range(24), strict=False)):
        text = render([{"role": "user", "content": problem.question}], tokenize=False, add_generation_prompt=True)
        made.append(
            Request(i, embedded_tokenizer(text, add_special_tokens=False).input_ids, 64, request_key(0, str(i)))
        )
    return made


@pytest.fixture(scope="module")
def samples(requests: list[Request]) -> list[Request]:
    """Three requests for a prompt, one after the other; all prompts begin as a chat does."""
    columns = enumerate(zip(*(request.prompt for request in requests), strict=False))
    prefix = next(i for i, column in columns if len(set(column)) > 1)
    return [
        replace(r, index=3 * r.index + i, key=request_key(i, str(r.index)), prefix=prefix)
        for r in requests[:8]
        for i in range(3)
    ]


def generate(
    model: Transformer,
    requests: list[Request],
    sequences: int = 8,
    config: DecodeConfig = CONFIG,
    **options,
) -> tuple[Engine, Texts]:
    engine = Engine(model, config, Solo(), EngineConfig(sequences, **options))
    return engine, {g.request.index: g.tokens for g in engine.generate(requests)}


def alike(found: Texts, wanted: Texts) -> float:
    """Share of tokens that are the same, place by place: where roundings differ, near-ties fall otherwise."""
    pairs = [pair for i, tokens in wanted.items() for pair in zip_longest(tokens, found[i])]
    return sum(one == other for one, other in pairs) / len(pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_give_the_eager_text(embedded_model: Transformer, requests: list[Request], dtype: torch.dtype) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    model = copy.deepcopy(embedded_model).to("cuda", dtype)
    _, wanted = generate(model, requests, attention="torch")
    engine, found = generate(model, requests)
    assert isinstance(engine.batch.runner, StaticRunner)
    assert alike(found, wanted) >= LEAST[dtype]
    _, alone = generate(model, requests, sequences=1)
    assert alike(alone, found) >= LEAST[dtype]


@pytest.mark.parametrize(
    ("options", "prefix_cache"),
    [
        ({}, "exact"),
        ({"temperature": 0.8}, "exact"),
        ({"temperature": 0.8, "top_p": 0.9}, "exact"),  # the record head has no graph
        ({"context": "blocks"}, "exact"),
        ({"context": "d2f_causal"}, "exact"),
        ({"context": "dual"}, "none"),
        ({"context": "vanilla"}, "none"),
    ],
    ids=str,
)
def test_graphs_give_the_eager_text_however_it_is_decoded(
    embedded_model: Transformer, samples: list[Request], options: dict[str, object], prefix_cache: str
) -> None:
    config = replace(CONFIG, **options)  # type: ignore[arg-type]
    torch.backends.cuda.matmul.allow_tf32 = False
    model = copy.deepcopy(embedded_model).to("cuda")
    _, wanted = generate(model, samples, config=config, attention="torch", prefix_cache=prefix_cache)
    engine, found = generate(model, samples, config=config, prefix_cache=prefix_cache)
    assert isinstance(engine.batch.runner, StaticRunner)
    assert (engine.statistics.prompt_reused > 0) == (prefix_cache != "none")
    assert alike(found, wanted) >= LEAST[torch.float32]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("rope_full_precision", torch.bfloat16),
        ("fp8", torch.bfloat16),
        ("int8", torch.bfloat16),
        ("int8", torch.float32),
    ],
)
def test_graphs_give_the_eager_text_of_other_models(
    embedded_model: Transformer, requests: list[Request], kind: str, dtype: torch.dtype
) -> None:
    """One that rotates in fp32 as LLaDA does, and those of eight bits."""
    if kind == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8")
    model = copy.deepcopy(embedded_model).to("cuda", dtype)
    if kind in QUANTIZATIONS:
        quantize(model, kind)
    else:
        model.config = replace(model.config, rope_fp32=True)
    _, wanted = generate(model, requests, attention="torch")
    engine, found = generate(model, requests)
    assert isinstance(engine.batch.runner, StaticRunner)
    assert alike(found, wanted) >= LEAST[dtype]


@pytest.mark.parametrize("kind", ["bfloat16", "float32", "int8"])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "top_p": 0.9}, {"context": "vanilla"}], ids=str)
def test_reproducible_is_to_the_bit(
    embedded_model: Transformer, samples: list[Request], kind: str, options: dict[str, object]
) -> None:
    """Alone, in company and in another order; branches of a sequence share nothing, so ranks change nothing either."""
    model = copy.deepcopy(embedded_model).to("cuda", torch.float32 if kind == "float32" else torch.bfloat16)
    if kind in QUANTIZATIONS:
        quantize(model, kind)
    config = replace(CONFIG, **options)  # type: ignore[arg-type]
    _, together = generate(model, samples, config=config, reproducible=True)
    for requests, sequences in ((samples, 1), (samples[::-1], 5), (samples[::2], 24)):
        _, found = generate(model, requests, sequences, config, reproducible=True)
        assert found == {r.index: together[r.index] for r in requests}


def test_reproducible_needs_what_makes_it_so(embedded_model: Transformer, requests: list[Request]) -> None:
    model = copy.deepcopy(embedded_model).to("cuda", torch.bfloat16)
    for options in ({"attention": "torch"}, {"graphs": "never"}):
        with pytest.raises(ValueError, match=r"engine\.reproducible=true on a GPU needs engine\.attention=meta"):
            generate(model, requests, reproducible=True, **options)


def test_both_back_ends_give_the_same_text(embedded_model: Transformer, requests: list[Request]) -> None:
    model = copy.deepcopy(embedded_model).to("cuda", torch.bfloat16)
    _, wanted = generate(model, requests, attention="torch")
    _, found = generate(model, requests, attention="meta", graphs="never")
    assert alike(found, wanted) >= LEAST[torch.bfloat16]


def test_the_host_waits_once_a_step(embedded_model: Transformer, requests: list[Request]) -> None:
    """One copy to the host a step, one more where requests end or come in, and a few in all for what is made once."""
    model = copy.deepcopy(embedded_model).to("cuda", torch.bfloat16)
    generate(model, requests)  # kernels are compiled
    engine = Engine(model, CONFIG, Solo(), EngineConfig(8))
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            finished = list(engine.generate(requests))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [w for w in caught if "synchroniz" in str(w.message)]
    assert len(finished) == len(requests)
    assert len(waits) <= engine.statistics.steps + 3 * len(requests) + 20
