"""The fused transformer computes what the modules compute, and holds no weight twice."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.roofline import projections
from lopa_dist.kernels.dispatch import suits_c
from lopa_dist.models.checkpoint import load_model
from lopa_dist.models.fused import Cache, FusedTransformer
from lopa_dist.models.transformer import Transformer
from tests.bits import same_row_bits
from tests.models.small_checkpoints import KINDS, reference, weights_of, write

CPU = torch.device("cpu")
ROWS, PADDED, SCRATCH = 21, 32, 7


@pytest.fixture(params=KINDS, scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint of every family."""
    kind = KINDS[request.param]
    return write(tmp_path_factory.mktemp(request.param), kind, weights_of(kind, reference(kind)))


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of the real rows, NaN in the others."""
    repeat = q.shape[1] // k.shape[1]
    out = torch.full_like(q, torch.nan)
    q, k, v = (x[:ROWS].transpose(0, 1) for x in (q, k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)))
    out[:ROWS] = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)
    return out


@torch.no_grad()
def hidden_of_both(model: Transformer, virtual_padding: bool = False) -> tuple[Tensor, Tensor]:
    """Hidden states of the modules, and of the fused form among NaN."""
    tokens = torch.randint(0, 46, (PADDED,), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(PADDED) + 5
    expected = model(tokens[:ROWS], positions[:ROWS], lambda layer, q, k, v: causal(q, k, v))
    config = model.config
    shape = (config.layers, SCRATCH + PADDED, config.kv_heads, config.head_dim)
    keys, values = torch.full((2, *shape), torch.nan, dtype=model.head_weight.dtype)

    def attend(layer: int, q: Tensor) -> Tensor:
        return causal(q, keys[layer, SCRATCH : SCRATCH + ROWS], values[layer, SCRATCH : SCRATCH + ROWS])

    rows = torch.tensor([ROWS], dtype=torch.int32)
    fused = FusedTransformer(copy.deepcopy(model))
    if virtual_padding:
        fused = fused.with_virtual_padding()
    found = fused(tokens, positions, rows, Cache(keys, values, SCRATCH), attend)
    slot = torch.arange(SCRATCH + PADDED)
    for pool in (keys, values):
        written = ~pool.isnan().flatten(2).any(2)
        assert (written == ((slot >= SCRATCH) & (slot < SCRATCH + ROWS))).all()
    return expected, found[:ROWS]


@pytest.mark.parametrize("quantization", ["none", "fp8", "int8"])
def test_hidden_states_of_the_real_rows(folder: Path, quantization: str) -> None:
    expected, found = hidden_of_both(load_model(folder, torch.float32, CPU, quantization=quantization))
    if quantization == "fp8":  # a last bit may fall to another of the 8-bit numbers
        assert (found - expected).norm() < 0.05 * expected.norm()
    else:
        assert torch.allclose(found, expected, atol=1e-4)


def test_the_products_of_a_model_follow_from_its_shape(folder: Path) -> None:
    model = load_model(folder, torch.float32, CPU)
    fused = FusedTransformer(model)
    by_name = projections(model.config)
    for layer in fused.layers:
        assert {name: tuple(getattr(layer, name).weight.shape) for name in by_name} == by_name
    assert fused.with_virtual_padding().real_rows_only
    assert not fused.real_rows_only, "others share the weights"


@same_row_bits
@torch.inference_mode()
def test_asked_for_some_rows_it_gives_these_with_the_bits_of_all(
    small_model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the feed-forward takes its rows in parts."""
    fused, config, rows = FusedTransformer(copy.deepcopy(small_model)), small_model.config, 48
    tokens = torch.randint(0, 46, (rows,), generator=torch.Generator().manual_seed(1))
    keys, values = torch.zeros(2, config.layers, SCRATCH + rows, config.kv_heads, config.head_dim)

    def attend(layer: int, q: Tensor) -> Tensor:
        assert len(q) == rows, "K/V and queries are those of all"
        k, v = (x[layer, SCRATCH:].repeat_interleave(config.heads // config.kv_heads, 1) for x in (keys, values))
        return F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v))).transpose(0, 1)

    def hidden(wanted: Tensor | None = None) -> Tensor:
        return fused(tokens, torch.arange(rows), None, Cache(keys, values, SCRATCH), attend, wanted)

    every = hidden()
    for wanted in (torch.arange(16), torch.tensor([47, 3, 3, 0, 21, 5, 46, 8] * 4), torch.arange(0)):
        some = hidden(wanted)
        assert some.shape == (len(wanted), config.hidden_size)
        assert torch.equal(some, every[wanted])
    monkeypatch.setattr("lopa_dist.models.fused.CPU_ROWS", 16)
    assert torch.equal(hidden(), every)


def test_products_of_real_rows_only(small_model: Transformer) -> None:
    expected, found = hidden_of_both(small_model, virtual_padding=True)
    assert torch.allclose(found, expected, atol=1e-4)


def test_no_weight_is_held_twice_and_the_modules_go_on(small_model: Transformer) -> None:
    model = copy.deepcopy(small_model)
    before = {name: p.clone() for name, p in model.named_parameters()}
    fused = FusedTransformer(model)
    for name, p in model.named_parameters():
        assert (p == before[name]).all()
    for modules, layer in zip(model.model.layers, fused.layers, strict=True):
        attention, mlp = modules.self_attn, modules.mlp
        parts = {layer.qkv: (attention.q_proj, attention.k_proj, attention.v_proj)}
        parts |= {layer.gate_up: (mlp.gate_proj, mlp.up_proj)}
        for whole, of in parts.items():
            assert {p.weight.untyped_storage().data_ptr() for p in (whole, *of)} == {whole.weight.data_ptr()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_cpu_weights_lie_by_columns_for_c(small_model: Transformer, dtype: torch.dtype) -> None:
    """In fp32 for torch's products, too."""
    by_columns = dtype == torch.float32 or suits_c(torch.zeros(1, dtype=dtype))
    model = copy.deepcopy(small_model).to(dtype)
    for parameter in model.parameters():  # as they are loaded; other tests may have merged these
        parameter.data = parameter.data.contiguous()
    fused = FusedTransformer(model)
    for layer in fused.layers:
        for linear in layer.projections:
            weight, _ = fused.operands[linear]
            assert weight.data_ptr() == linear.weight.data_ptr()
            assert weight.is_contiguous() == by_columns
            assert linear.weight.is_contiguous() != weight.is_contiguous()
