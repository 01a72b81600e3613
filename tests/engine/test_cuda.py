"""The engine on a GPU: graphs against the eager path, and how often the host waits for the device."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.products import measure_products
from lopa_dist.engine.request import Request, request_key
from lopa_dist.engine.runners import merged
from lopa_dist.engine.static_runner import StaticRunner
from lopa_dist.kernels.products import PRODUCTS
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Solo
from lopa_dist.tasks.word_problems import problems

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CONFIG = DecodeConfig(branches=3, block_size=16, max_new_tokens=64)
Texts = dict[int, tuple[list[int], int]]


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


def generate(model: Transformer, requests: list[Request], sequences: int = 8, **options) -> tuple[Engine, Texts]:
    engine = Engine(model, CONFIG, Solo(), sequences, **options)
    return engine, {g.request.index: (g.tokens, g.forwards) for g in engine.generate(requests)}


def alike(found: Texts, wanted: Texts) -> float:
    """Share of equal texts: near-ties may fall otherwise where roundings differ."""
    return sum(found[i] == wanted[i] for i in wanted) / len(wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_give_the_eager_text(embedded_model: Transformer, requests: list[Request], dtype: torch.dtype) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    model = copy.deepcopy(embedded_model).to("cuda", dtype)
    _, wanted = generate(model, requests, attention="torch")
    engine, found = generate(model, requests)
    assert isinstance(engine.flight.runner, StaticRunner)
    assert alike(found, wanted) >= (1.0 if dtype == torch.float32 else 0.8)
    _, alone = generate(model, requests, sequences=1)
    assert alike(alone, found) >= (1.0 if dtype == torch.float32 else 0.8)


@pytest.mark.parametrize("attention", ["meta", "varlen"])
def test_other_back_ends_give_the_same_text(
    embedded_model: Transformer, requests: list[Request], attention: str
) -> None:
    model = copy.deepcopy(embedded_model).to("cuda", torch.bfloat16)
    _, wanted = generate(model, requests, attention="torch")
    _, found = generate(model, requests, attention=attention, graphs="never")
    assert alike(found, wanted) >= 0.8


@pytest.mark.parametrize("way", [name for name in PRODUCTS if name != "library"])
def test_every_way_to_multiply_is_measured_and_gives_the_same_text(
    embedded_model: Transformer, requests: list[Request], way: str
) -> None:
    model = copy.deepcopy(embedded_model).to("cuda", torch.bfloat16)
    times = measure_products(merged(model), most_rows=1024, budget_s=60)
    if way not in times[0].us:
        pytest.skip(f"this GPU has no {way} products")
    _, wanted = generate(model, requests)
    _, found = generate(model, requests, products={(t.rows, t.outputs, t.inputs): way for t in times})
    assert alike(found, wanted) >= 0.8


def test_the_host_waits_once_a_step(embedded_model: Transformer, requests: list[Request]) -> None:
    """One copy to the host a step, one more where requests end or come in, and a few in all for what is made once."""
    model = copy.deepcopy(embedded_model).to("cuda", torch.bfloat16)
    generate(model, requests)  # kernels are compiled
    engine = Engine(model, CONFIG, Solo(), 8)
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
