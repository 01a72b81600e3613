"""Mixtures of experts: in engines' form, over tensor ranks, with adapters; and how rows choose."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from lopa_dist.engine.memory import filling_bytes, plan, row_bytes, token_bytes
from lopa_dist.engine.runners import fused_form_of
from lopa_dist.kernels.experts import TALL
from lopa_dist.kernels.routing import room_for
from lopa_dist.models.adapter import load_adapter
from lopa_dist.models.checkpoint import load_model
from lopa_dist.models.config import QUANTIZATIONS, Experts
from lopa_dist.models.config_file import read_config
from lopa_dist.models.experts import Gate, SparseMLP
from lopa_dist.models.files import CheckpointError
from lopa_dist.models.fused import Cache, FusedTransformer
from lopa_dist.models.quantize import QUANTIZERS, mixtures
from lopa_dist.models.tensor_parallel import check
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Communicator
from tests.bits import same_row_bits
from tests.conftest import SMALL
from tests.engine.ranks import on_mesh
from tests.models.small_checkpoints import MOE_KINDS, reference, weights_of, write
from tests.models.test_adapter import adapter_for, write_adapter

CPU = torch.device("cpu")
TOKENS = torch.randint(0, 78, (48,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=MOE_KINDS, scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind = MOE_KINDS[request.param]
    return write(tmp_path_factory.mktemp(request.param), kind, weights_of(kind, reference(kind)), shards=3)


@torch.inference_mode()
def rows_of(model: Transformer, tokens: Tensor = TOKENS, ranks: int = 1) -> Tensor:
    """Hidden rows as engines compute them, where each row sees itself alone."""
    config = model.config
    keys, values = torch.zeros(2, config.layers, len(tokens), config.kv_heads // ranks, config.head_dim)
    group = config.heads // config.kv_heads
    cache = Cache(keys, values, 0)
    places = torch.arange(len(tokens))
    return FusedTransformer(model)(tokens, places, None, cache, lambda i, q: values[i].repeat_interleave(group, 1))


def test_softmax_routers_choose_the_most_probable_experts() -> None:
    for renormalise in (False, True):
        gate = Gate(6, Experts(count=5, chosen=2, size=4, router="softmax", renormalise=renormalise))
        gate.weight = torch.nn.Parameter(torch.randn(5, 6, generator=torch.Generator().manual_seed(0)), False)
        x = torch.randn(7, 6, generator=torch.Generator().manual_seed(1))
        chosen, weights = gate(x)
        for row, picks, shares in zip(x, chosen.tolist(), weights.tolist(), strict=True):
            probability = (gate.weight @ row).softmax(0)
            best = sorted(range(5), key=lambda e: -float(probability[e]))[:2]
            total = float(probability[best].sum()) if renormalise else 1.0
            assert picks == best
            assert shares == pytest.approx([float(probability[e]) / total for e in best], abs=1e-6)


def test_routers_that_are_written_in_place_route_by_their_new_weights() -> None:
    """From the next generation on, which asks for the fused form."""
    config = replace(SMALL, experts=Experts(count=5, chosen=2, size=4, router="grouped_sigmoid", renormalise=True))
    model = Transformer(config).bfloat16()
    fused_form_of(model)
    [gate, *_] = [mlp.gate for mlp in mixtures(model)]
    x = torch.randn(7, config.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.inference_mode():
        assert not gate.logits(x).any()
        copy = gate.in_fp32()
    gate.weight.data.fill_(1.0)
    fused_form_of(model)
    with torch.inference_mode():
        assert torch.equal(gate.logits(x), torch.nn.functional.linear(x.float(), torch.ones(5, config.hidden_size)))
        assert gate.in_fp32() is copy, "graphs hold its address"


@same_row_bits
@torch.inference_mode()
def test_engines_form_is_the_modules_and_parts_change_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(folder, torch.float32, CPU)
    group = model.config.heads // model.config.kv_heads
    expected = model(TOKENS, torch.arange(48), lambda layer, q, k, v: v.repeat_interleave(group, 1))
    found = rows_of(copy.deepcopy(model))
    assert (found - expected).abs().max() <= 1e-5
    monkeypatch.setattr("lopa_dist.models.fused.CPU_ROWS", 16)
    assert torch.equal(rows_of(model), found)


@pytest.mark.parametrize("kind", ["none", *QUANTIZATIONS])
def test_a_rows_bits_do_not_depend_on_the_others(folder: Path, kind: str) -> None:
    """Where no row sees another one, only the experts could mix them."""
    model = load_model(folder, torch.float32, CPU, quantization=kind)
    every = rows_of(copy.deepcopy(model))
    assert torch.equal(rows_of(copy.deepcopy(model), TOKENS[:16]), every[:16])
    other = TOKENS.clone()
    other[16:] = 3
    assert torch.equal(rows_of(model, other)[:16], every[:16])


def test_tensor_ranks_have_their_columns_of_every_expert(folder: Path) -> None:
    model = load_model(folder, torch.float32, CPU)
    whole = rows_of(copy.deepcopy(model))

    def work(comm: Communicator, tensor: Communicator) -> tuple[Tensor, Transformer]:
        mine = load_model(folder, torch.float32, CPU, None, tensor)
        return rows_of(mine, ranks=2), mine

    parts = on_mesh(1, 2, work)
    for rows, _ in parts:
        assert (rows - whole).abs().max() <= 1e-5
    for number, layer in enumerate(model.model.layers):
        mine = [part.model.layers[number].mlp for _, part in parts]
        assert torch.equal(torch.cat([m.gate_up for m in mine], 2), layer.mlp.gate_up)
        assert torch.equal(torch.cat([m.down for m in mine], 1), layer.mlp.down)
    with pytest.raises(ValueError, match="does not divide the model's 32 experts' size"):
        check(replace(model.config, heads=3, kv_heads=3, hidden_size=48), 3)


def test_adapters_are_merged_into_experts(folder: Path, tmp_path: Path) -> None:
    weights = weights_of(MOE_KINDS["rnd1"], reference(MOE_KINDS["rnd1"]))
    names = [n for n in weights if ".experts.5.up_proj" in n]
    tensors = adapter_for({n: weights[n] for n in names}, ["up_proj"])
    lora = write_adapter(tmp_path / "lora", tensors, target_modules=["experts.5.up_proj"])
    plain = load_model(folder, torch.float32, CPU)
    merged = load_model(folder, torch.float32, CPU, load_adapter(lora))
    for number, layer in enumerate(merged.model.layers):
        assert isinstance(layer.mlp, SparseMLP)
        changed = (layer.mlp.gate_up != plain.model.layers[number].mlp.gate_up).flatten(2).any(2).nonzero()
        assert changed.tolist() == [[5, 1]]


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_quantised_experts(folder: Path, kind: str) -> None:
    """Each output channel of each expert on its own, a byte a number, as they are loaded; also on tensor ranks."""
    plain, model = (load_model(folder, torch.float32, CPU, quantization=one) for one in ("none", kind))
    for ours, wide in zip(model.model.layers, plain.model.layers, strict=True):
        for name in ("gate_up", "down"):
            eight, scale, wanted = (getattr(mlp, name) for mlp, name in
                                    ((ours.mlp, name), (ours.mlp, f"{name}_scale"), (wide.mlp, name)))  # fmt: skip
            assert eight.element_size() == 1
            by_rows, scales = QUANTIZERS[kind](wanted.flatten(0, -2))
            assert torch.equal(eight.float(), by_rows.view_as(eight).float())
            assert torch.equal(scale, scales.view_as(scale))
        assert ours.mlp.gate.weight.dtype == torch.float32
    whole, near = rows_of(copy.deepcopy(model)), rows_of(plain)
    error = (whole - near).norm() / near.norm()
    assert 0 < error < (0.03 if kind == "int8" else 0.15)

    def work(comm: Communicator, tensor: Communicator) -> Tensor:
        return rows_of(load_model(folder, torch.float32, CPU, None, tensor, kind), ranks=2)

    for rows in on_mesh(1, 2, work):
        assert (rows - whole).abs().max() <= (1e-5 if kind == "int8" else 1e-2)  # a bit more may be another fp8 number


def test_a_quantised_expert_with_nan_is_named(tmp_path: Path) -> None:
    kind = MOE_KINDS["sdar_moe"]
    weights = weights_of(kind, reference(kind))
    weights["model.layers.1.mlp.experts.6.up_proj.weight"][3, 2] = torch.nan
    with pytest.raises(ValueError, match=r"row 3 of a weight of shape .* holds NaN or infinity"):
        load_model(write(tmp_path, kind, weights), torch.float32, CPU, quantization="int8")


def test_an_experts_missing_weight_is_named(tmp_path: Path) -> None:
    kind = MOE_KINDS["sdar_moe"]
    weights = weights_of(kind, reference(kind))
    del weights["model.layers.1.mlp.experts.6.up_proj.weight"]
    write(tmp_path, kind, weights)
    with pytest.raises(CheckpointError, match=r"1 tensors missing: model\.layers\.1\.mlp\.experts\.6\.up_proj"):
        load_model(tmp_path, torch.float32, CPU)


def test_rows_of_experts_count_in_memory(folder: Path) -> None:
    config = read_config(folder)
    assert config.experts is not None
    each = config.experts.chosen * (2 * config.hidden_size + 3 * config.experts.size)
    without = replace(config, experts=None, intermediate_size=1)
    assert row_bytes(config, 4) - row_bytes(without, 4) == 4 * (each - 3)


@pytest.mark.parametrize("choices", [1, 40, 700])
def test_rows_that_fill_up_tiles_count_in_memory(folder: Path, choices: int) -> None:
    """However rows choose, on a GPU there is room for a part of a tall tile of every expert."""
    config = read_config(folder)
    assert config.experts is not None
    each = 2 * config.hidden_size + 3 * config.experts.size
    room = room_for(choices, config.experts.count, TALL) * each * 2
    assert room <= choices * each * 2 + filling_bytes(config, 2) + TALL * each * 2
    assert filling_bytes(replace(config, experts=None), 2) == 0
    needs = np.array([32])
    taken = plan(config, 2, 1 << 40, needs, 1, 64, None, 64, lambda rows: 0).bytes
    assert taken == 32 * token_bytes(config, 2) + 64 * row_bytes(config, 2) + filling_bytes(config, 2)


@torch.inference_mode()
def test_rows_that_are_not_numbers_stay_alone(folder: Path) -> None:
    """Padding may hold anything: its experts get it, and nobody else does."""
    mlp = load_model(folder, torch.float32, CPU).model.layers[0].mlp
    x = torch.randn(16, 48, generator=torch.Generator().manual_seed(2))
    broken = x.clone()
    broken[9] = torch.nan
    expected, found = mlp(x), mlp(broken)
    assert found[9].isnan().all()
    keep = torch.arange(16) != 9
    assert torch.equal(found[keep], expected[keep])
