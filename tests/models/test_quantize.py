"""Quantised models: near the plain ones, smaller, and the same on tensor ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lopa_dist.decode import DecodeConfig
from lopa_dist.embedded.tokenizer import prompt_text
from lopa_dist.models.checkpoint import load_model
from lopa_dist.models.files import EMBEDDED
from lopa_dist.models.quantize import KINDS, QuantizedLinear, joined
from lopa_dist.models.tokenizer import load_tokenizer
from lopa_dist.models.transformer import Transformer
from lopa_dist.tasks.word_problems import problems
from tests.engine.ranks import on_mesh
from tests.engine.test_loop import random_requests, texts

CPU = torch.device("cpu")


@torch.no_grad()
def probabilities(model: Transformer) -> Tensor:
    """What the model says of the masks behind a problem."""
    prompt = load_tokenizer(EMBEDDED).encode(prompt_text(next(problems("held_out", 1)).question))
    tokens = torch.tensor([*prompt, *[model.config.mask_id] * 64])

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1) for x in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)))
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(0, 1)

    hidden = model(tokens, torch.arange(len(tokens)), attend)[len(prompt) - 1 : -1]
    return (hidden @ model.head_weight.T).softmax(-1)


@pytest.mark.parametrize(("kind", "bound"), [("int8", 0.04), ("fp8", 0.15)])
def test_predictions_change_little_and_weights_are_small(kind: str, bound: float, embedded_model: Transformer) -> None:
    model = load_model(EMBEDDED, torch.float32, CPU, quantization=kind)
    plain, found = probabilities(embedded_model), probabilities(model)
    distance = (plain - found).abs().sum(1).mean() / 2  # total variation
    assert 0 < distance < bound
    projections = [m for m in model.modules() if isinstance(m, QuantizedLinear)]
    assert len(projections) == 7 * model.config.layers
    assert {m.weight.element_size() for m in projections} == {1}
    assert not [m for m in model.model.modules() if isinstance(m, nn.Linear)]


@pytest.mark.parametrize("kind", KINDS)
def test_same_text_on_two_tensor_ranks(kind: str) -> None:
    config = DecodeConfig(branches=2, block_size=16, max_new_tokens=32)
    requests = random_requests(2, 3, 32)
    wanted = texts(load_model(EMBEDDED, torch.float32, CPU, quantization=kind), config, requests)

    def part(comm: object, tensor: object) -> object:
        from lopa_dist.engine.loop import Engine

        model = load_model(EMBEDDED, torch.float32, CPU, tensor=tensor, quantization=kind)
        engine = Engine(model, config, comm, 4, "torch", tensor=tensor)
        return {g.request.index: (g.tokens, g.forwards) for g in engine.generate(requests)}

    for found in on_mesh(1, 2, part):
        assert found == wanted


def test_joined_maps_are_their_parts_side_by_side() -> None:
    parts = [nn.Linear(8, n) for n in (4, 6, 2)]
    x = torch.randn(5, 8)
    for make in (lambda p: p, lambda p: QuantizedLinear.of("int8", p)):
        some = [make(p) for p in parts]
        expected = torch.cat([p(x) for p in some], 1)
        whole = joined(some)
        assert torch.allclose(whole(x), expected, atol=1e-5)
        assert torch.allclose(torch.cat([p(x) for p in some], 1), expected)
