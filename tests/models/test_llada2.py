"""LLaDA2.0: the authors' own logits, its router by the definition, and its near misses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from lopa_dist.models.adapter import load_adapter
from lopa_dist.models.checkpoint import load_model
from lopa_dist.models.config import Experts
from lopa_dist.models.config_file import read_config
from lopa_dist.models.experts import Gate
from lopa_dist.models.families import training_pattern
from lopa_dist.models.files import CheckpointError
from lopa_dist.models.fused import Cache, FusedTransformer
from lopa_dist.models.quantize import QuantizedLinear
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Communicator
from tests.engine.ranks import on_mesh
from tests.models import llada2
from tests.models.one_checkpoint import edit_config
from tests.models.small_checkpoints import write
from tests.models.test_adapter import adapter_for, write_adapter

CPU = torch.device("cpu")
PLACES = torch.arange(llada2.LENGTH)
SEEN = PLACES[:, None] // llada2.BLOCK >= PLACES // llada2.BLOCK


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("llada2"), llada2.KIND, llada2.weights(), shards=2)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1) for x in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)))
    scores = (q @ k.transpose(1, 2) * 16**-0.5).masked_fill(~SEEN, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1)


@torch.inference_mode()
def fused_logits(model: Transformer, ranks: int = 1) -> Tensor:
    keys, values = torch.zeros(2, 3, llada2.LENGTH, 2 // ranks, 16)
    cache = Cache(keys, values, 0)
    hidden = FusedTransformer(model)(llada2.tokens(), PLACES, None, cache, lambda i, q: attended(q, keys[i], values[i]))
    return hidden @ model.head_weight.T


@torch.inference_mode()
def test_logits_are_those_of_the_authors(folder: Path) -> None:
    """Of the modules and as engines run them: dense first layer, groups, biases, shared expert, half rotated heads."""
    model, wanted = load_model(folder, torch.float32, CPU), torch.from_numpy(np.load(llada2.LOGITS))
    assert wanted.std() > 0.5
    logits = model(llada2.tokens(), PLACES, lambda layer, q, k, v: attended(q, k, v)) @ model.head_weight.T
    assert (logits - wanted).abs().max() <= 5e-5
    assert (fused_logits(model) - wanted).abs().max() <= 5e-5


def test_tensor_ranks(folder: Path) -> None:
    wanted = torch.from_numpy(np.load(llada2.LOGITS))
    ours = on_mesh(1, 2, lambda comm, tensor: rank_logits(folder, tensor))
    assert (torch.cat(ours, 1) - wanted).abs().max() <= 5e-5


def rank_logits(folder: Path, tensor: Communicator) -> Tensor:
    """The rank's columns of the vocabulary."""
    return fused_logits(load_model(folder, torch.float32, CPU, None, tensor), 2)


def test_the_share_of_heads_that_is_rotated(tmp_path: Path) -> None:
    """Half, as the authors' program takes it, or what either place says."""
    folder = write(tmp_path, llada2.KIND, {})
    edit_config(folder, partial_rotary_factor=...)
    assert read_config(folder).rotated == 8
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    edit_config(folder, rope_parameters=rope, rope_theta=...)
    assert read_config(folder).rotated == 4
    edit_config(folder, partial_rotary_factor=0.5)
    with pytest.raises(CheckpointError, match=r"partial_rotary_factor is 0\.5 in config\.json and 0\.25 in"):
        read_config(folder)


def test_conventions(folder: Path) -> None:
    config = read_config(folder)
    assert (config.shift, config.mask_id, config.rotated, config.eos_ids) == (False, 79, 8, (156892,))
    assert config.experts == Experts(
        count=16, chosen=4, size=32, router="grouped_sigmoid", renormalise=True, scale=2.5, groups=4, chosen_groups=2,
        shared=32, dense_layers=1,
    )  # fmt: skip
    at = training_pattern(config)
    assert (at.context, at.block_size) == ("blocks", 32)


def test_biases_stay_in_fp32(folder: Path) -> None:
    """They decide between experts whose scores are close."""
    gates = [layer.mlp.gate for layer in load_model(folder, torch.bfloat16, CPU).model.layers[1:]]
    assert [gate.expert_bias.dtype for gate in gates] == [torch.float32] * 2
    assert [gate.weight.dtype for gate in gates] == [torch.bfloat16] * 2


def test_the_router_by_its_definition() -> None:
    experts = Experts(12, 3, 4, "grouped_sigmoid", True, scale=2.5, groups=4, chosen_groups=2)
    gate, draw = Gate(6, experts), torch.Generator().manual_seed(0)
    gate.weight = torch.nn.Parameter(torch.randn(12, 6, generator=draw), False)
    gate.expert_bias = torch.nn.Parameter(0.5 * torch.randn(12, generator=draw), False)
    x = torch.randn(40, 6, generator=draw)
    without = set()
    for row, picks, shares in zip(x, *(part.tolist() for part in gate(x)), strict=True):
        score = (gate.weight @ row).sigmoid().tolist()
        rank = [s + float(b) for s, b in zip(score, gate.expert_bias, strict=True)]
        groups = [range(g * 3, g * 3 + 3) for g in range(4)]
        groups = sorted(groups, key=lambda group: -sum(sorted((rank[e] for e in group), reverse=True)[:2]))[:2]
        best = sorted((e for group in groups for e in group), key=lambda e: -rank[e])[:3]
        assert picks == best
        assert shares == pytest.approx([2.5 * score[e] / sum(score[i] for i in best) for e in best], rel=1e-5)
        without.add(best == sorted(range(12), key=lambda e: -rank[e])[:3])
    assert without == {True, False}, "groups exclude some rows' best experts"


def test_adapters_are_merged_before_their_module_is_taken_apart(folder: Path, tmp_path: Path) -> None:
    name = "model.layers.2.attention.query_key_value.weight"
    tensors = adapter_for({name: llada2.weights()[name]}, ["query_key_value"])
    lora = write_adapter(tmp_path / "lora", tensors, target_modules=["layers.2.attention.query_key_value"])
    adapter = load_adapter(lora)
    changed = llada2.weights()
    changed[name] = adapter.merge(name, changed[name])
    expected = load_model(write(tmp_path / "merged", llada2.KIND, changed), torch.float32, CPU)
    found = load_model(folder, torch.float32, CPU, adapter)
    for ours, weight in expected.state_dict().items():
        assert torch.equal(found.state_dict()[ours], weight)


def test_the_dense_layer_and_shared_experts_are_quantised(folder: Path) -> None:
    model = load_model(folder, torch.float32, CPU, quantization="int8")
    first, second = (layer.mlp for layer in model.model.layers[:2])
    for block in (first, second.shared_experts):
        assert all(isinstance(part, QuantizedLinear) for part in (block.gate_proj, block.up_proj, block.down_proj))
    wanted = torch.from_numpy(np.load(llada2.LOGITS))
    errors = (fused_logits(model) - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert 0 < errors.median() < 0.06  # a few rows take other experts, which differ more


@pytest.mark.parametrize(
    ("length", "name", "edits"),
    [
        (16384, "mine", False),
        (32768, "mine", True),
        (16384, "LLaDA2.1-mini", True),
        (32768, "LLaDA2.0-mini-longer", False),
    ],
)
def test_which_ones_edit(length: int, name: str, edits: bool, tmp_path: Path) -> None:
    """By the name, else by the length of the context."""
    at = write(tmp_path / name, llada2.KIND, {})
    edit_config(at, max_position_embeddings=length)
    assert training_pattern(read_config(at)).edits == edits


@pytest.mark.parametrize(
    ("change", "name", "message"),
    [
        ({"max_position_embeddings": 131072}, "mine", r"=131072 in mine is LLaDA2\.2, which inserts and deletes"),
        ({}, "LLaDA2.2-flash", r"in LLaDA2\.2-flash is LLaDA2\.2"),
        ({"score_function": "softmax"}, "mine", "score_function='softmax' is not supported, only 'sigmoid'"),
        ({"norm_topk_prob": False}, "mine", "norm_topk_prob=False"),
        ({"use_qkv_bias": True}, "mine", "use_qkv_bias=True"),
        ({"image_token_offset": 157184}, "mine", "image_token_offset=157184"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "mine", "rope_scaling of type 'yarn'"),
        ({"n_group": ...}, "mine", "no 'n_group' in it"),
        ({"n_group": 5}, "mine", "n_group=5: must divide num_experts=16"),
        ({"topk_group": 5}, "mine", "topk_group=5: must be between 1 and n_group=4"),
        ({"num_experts_per_tok": 9}, "mine", "groups of 4 experts must have num_experts_per_tok=9"),
    ],
)
def test_near_misses_are_refused(change: dict[str, object], name: str, message: str, tmp_path: Path) -> None:
    at = write(tmp_path / name, llada2.KIND, {})
    edit_config(at, **change)
    with pytest.raises(CheckpointError, match=message):
        read_config(at)
