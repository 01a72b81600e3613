"""Quantised models: near the plain ones, smaller, and the same on tensor ranks."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import Tensor, nn

from lopa_dist.config import ModelOptions
from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.jobs.setup import build
from lopa_dist.jobs.setup.build import EngineBuilder
from lopa_dist.models import checkpoint
from lopa_dist.models.checkpoint import load_model
from lopa_dist.models.config import QUANTIZATIONS
from lopa_dist.models.files import EMBEDDED
from lopa_dist.models.quantize import QuantizedLinear, check, joined
from lopa_dist.models.tokenizer import load_tokenizer
from lopa_dist.models.transformer import Transformer
from lopa_dist.tasks.word_problems import problems
from tests.engine.ranks import on_mesh
from tests.engine.test_loop import random_requests, texts
from training.tokenizer import prompt_text

CPU = torch.device("cpu")


@torch.no_grad()
def probabilities(model: Transformer) -> Tensor:
    """What the model says of the masks after a problem."""
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_device_never_holds_the_unquantised_projections(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, embedded_model: Transformer
) -> None:
    """They stay on the host, as the checkpoint has them, until each is quantised: a GPU may have no room for all."""
    meta = torch.device("meta")
    before: dict[str, tuple[torch.device, torch.dtype]] = {}

    def noted(model: Transformer, *given: object) -> None:
        before.update({name: (x.device, x.dtype) for name, x in model.named_parameters()})
        raise InterruptedError

    monkeypatch.setattr(checkpoint, "quantize", noted)
    with pytest.raises(InterruptedError):
        load_model(EMBEDDED, dtype, meta, quantization="int8")
    projections = {name for name in before if "_proj." in name}
    assert sum(name.endswith("weight") for name in projections) == 7 * embedded_model.config.layers
    assert {before.pop(name) for name in projections} == {(CPU, torch.bfloat16)}  # as they are stored
    assert set(before.values()) == {(meta, dtype)}


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_weights_are_quantised_in_the_models_precision(kind: str) -> None:
    """Not in the checkpoint's, so that the numbers do not depend on where a weight waited."""
    linear = nn.Linear(8, 4)
    wanted = QuantizedLinear.of(kind, copy.deepcopy(linear).bfloat16())
    found = QuantizedLinear.of(kind, linear, CPU, torch.bfloat16)
    assert torch.equal(found.weight.view(torch.uint8), wanted.weight.view(torch.uint8))
    assert torch.equal(found.scale, wanted.scale)
    assert found.bias is not None
    assert wanted.bias is not None
    assert torch.equal(found.bias, wanted.bias)


def test_what_a_gpu_cannot_multiply_is_refused_before_weights_are_read(
    monkeypatch: pytest.MonkeyPatch, small_model: Transformer
) -> None:
    gpu = torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(checkpoint, "opened", lambda file: pytest.fail("weights were read"))
    monkeypatch.setattr(checkpoint, "stored_tensors", lambda files: {})
    monkeypatch.setattr(checkpoint, "compare", lambda *of: None)
    with pytest.raises(ValueError, match="A100: its products need compute capability"):
        load_model(EMBEDDED, torch.bfloat16, gpu, quantization="fp8")
    check(small_model, "int8", gpu)
    check(small_model, "fp8", CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check(small_model, "fp8", gpu)
    odd = copy.deepcopy(small_model)
    odd.model.layers[1].mlp.up_proj = nn.Linear(32, 40)
    with pytest.raises(ValueError, match=r"\[40, 32\] is not in multiples of 16"):
        check(odd, "fp8", gpu)


@pytest.mark.parametrize(("kind", "warnings"), [("fp8", 1), ("int8", 0), ("none", 0)])
def test_a_cpu_says_that_it_emulates(kind: str, warnings: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "lopa_dist"):
        EngineBuilder(ModelOptions(quantization=kind), CPU).load(warn=True)
        EngineBuilder(ModelOptions(quantization=kind), CPU).load(warn=False)
    assert [r.message for r in caplog.records].count(
        "WARNING: model.quantization=fp8 is emulated on a CPU, slower than model.quantization=none: "
        "it shows what fp8 does to the texts, and nothing of its speed"
    ) == warnings  # fmt: skip


@pytest.mark.parametrize(("kind", "of_hopper", "warnings"), [("int8", True, 1), ("int8", False, 0), ("fp8", True, 0)])
def test_int8_is_said_to_be_slow_where_it_was_measured(
    kind: str, of_hopper: bool, warnings: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "hopper", lambda device: of_hopper)
    monkeypatch.setattr(build, "load_model", lambda *_: None)
    builder = EngineBuilder(ModelOptions(quantization=kind), CPU)
    builder.device = torch.device("cuda")
    with caplog.at_level(logging.WARNING, "lopa_dist"):
        builder.load(warn=True)
    assert sum("model.quantization=int8 is slower than none" in r.message for r in caplog.records) == warnings


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_same_text_on_two_tensor_ranks(kind: str) -> None:
    config = DecodeConfig(verify="confidence", drafts=0, branches=2, block_size=16, max_new_tokens=32)
    requests = random_requests(2, 3, 32)
    wanted = texts(load_model(EMBEDDED, torch.float32, CPU, quantization=kind), config, requests)

    def part(comm: object, tensor: object) -> object:
        from lopa_dist.engine.loop import Engine

        model = load_model(EMBEDDED, torch.float32, CPU, tensor=tensor, quantization=kind)
        engine = Engine(model, config, comm, EngineConfig(4, attention="torch"), tensor=tensor)
        return {g.request.index: (g.tokens, g.forwards) for g in engine.generate(requests)}

    for found in on_mesh(1, 2, part):
        assert found == wanted


def test_joined_maps_are_their_parts_side_by_side() -> None:
    torch.manual_seed(0)
    parts = [nn.Linear(8, n) for n in (4, 6, 2)]
    x = torch.randn(5, 8)
    for make in (lambda p: p, lambda p: QuantizedLinear.of("int8", p)):
        some = [make(p) for p in parts]
        expected = torch.cat([p(x) for p in some], 1)
        whole = joined(some)
        assert torch.allclose(whole(x), expected, atol=1e-5)
        assert torch.allclose(torch.cat([p(x) for p in some], 1), expected, atol=1e-5)  # now views of one weight
