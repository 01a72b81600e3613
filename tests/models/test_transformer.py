"""Our transformer and the Hugging Face Qwen2 give the same logits for the same weights and mask."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from lopa_dist.models.checkpoint import load_model
from lopa_dist.models.config import ModelConfig
from lopa_dist.models.transformer import Attend, Transformer
from tests.conftest import SMALL
from tests.models.small_checkpoints import enlarged
from training.checkpoint import config_json

CPU = torch.device("cpu")
ROWS, LENGTH = 2, 23


def config_of(heads: int = 4, kv_heads: int = 2, tied: bool = False, layers: int = 3) -> ModelConfig:
    return replace(
        SMALL, vocab_size=80, hidden_size=48, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=48 // heads,
        intermediate_size=112, rms_eps=1e-5, rope_theta=12_345.0, tied=tied, mask_id=79, eos_ids=(78,), pad_id=77,
        max_positions=128,
    )  # fmt: skip


def qwen2(config: ModelConfig) -> Qwen2ForCausalLM:
    """The reference, with weights so large that attention and biases matter."""
    reference = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            max_position_embeddings=config.max_positions,
            rms_norm_eps=config.rms_eps,
            rope_theta=config.rope_theta,
            tie_word_embeddings=config.tied,
            attn_implementation="eager",
        )
    )
    return enlarged(reference)


def ours(config: ModelConfig, reference: Qwen2ForCausalLM, folder: Path) -> Transformer:
    """The reference's weights as an fp32 Dream checkpoint, loaded back."""
    weights = {n: w.clone() for n, w in reference.state_dict().items()}
    if config.tied:
        del weights["lm_head.weight"]
    (folder / "config.json").write_text(json.dumps(config_json(config)))
    save_file(weights, folder / "model.safetensors")
    return load_model(folder, torch.float32, CPU)


def dense(visible: Tensor, group: int) -> Attend:
    """Attention of ROWS packed sequences under one ``[L, L]`` mask."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (ROWS, -1)).transpose(1, 2) for x in (q, k, v))
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        return F.scaled_dot_product_attention(q, k, v, visible).transpose(1, 2).flatten(0, 1)

    return attend


def masks() -> dict[str, Tensor]:
    block = torch.arange(LENGTH) // 6
    return {"full": torch.ones(LENGTH, LENGTH, dtype=torch.bool), "block_causal": block[:, None] >= block}


@torch.no_grad()
def logits_of_both(
    config: ModelConfig, folder: Path, visible: Tensor, first_position: int = 0
) -> tuple[Tensor, Tensor]:
    reference = qwen2(config)
    model = ours(config, reference, folder)
    tokens = torch.randint(0, config.vocab_size, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(first_position, first_position + LENGTH).expand(ROWS, LENGTH)
    additive = torch.zeros(LENGTH, LENGTH).masked_fill(~visible, torch.finfo(torch.float32).min)
    wanted = reference(tokens, additive.expand(ROWS, 1, -1, -1), position_ids=positions).logits
    hidden = model(tokens.flatten(), positions.flatten(), dense(visible, config.heads // config.kv_heads))
    assert hidden.shape == (ROWS * LENGTH, config.hidden_size)
    return F.linear(hidden, model.head_weight).unflatten(0, (ROWS, LENGTH)), wanted


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("mask", ["full", "block_causal"])
def test_logits_equal_qwen2(mask: str, heads: int, kv_heads: int, tied: bool, tmp_path: Path) -> None:
    logits, wanted = logits_of_both(config_of(heads, kv_heads, tied), tmp_path, masks()[mask])
    assert wanted.std() > 0.5  # else a difference of 1e-4 says nothing
    assert (logits - wanted).abs().max() <= 1e-4


def test_logits_equal_qwen2_at_later_positions(tmp_path: Path) -> None:
    logits, wanted = logits_of_both(config_of(), tmp_path, masks()["block_causal"], first_position=90)
    assert (logits - wanted).abs().max() <= 1e-4


@torch.no_grad()
def test_attend_alone_decides_what_a_row_sees(tmp_path: Path) -> None:
    config = config_of(layers=2)
    model = ours(config, qwen2(config), tmp_path)
    tokens = torch.randint(0, 70, (ROWS * LENGTH,), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(LENGTH).repeat(ROWS)
    changed = tokens.clone()
    changed[12] = (tokens[12] + 1) % 70  # block 2 of the first sequence
    for name, rows in (("full", range(LENGTH)), ("block_causal", range(12, LENGTH))):
        a, b = (model(t, positions, dense(masks()[name], 2)) for t in (tokens, changed))
        moved = (a - b).abs().amax(1) > 1e-4
        assert moved.nonzero()[:, 0].tolist() == list(rows)


@torch.no_grad()
def test_rows_carry_their_own_positions(tmp_path: Path) -> None:
    config = config_of(layers=2)
    model = ours(config, qwen2(config), tmp_path)
    tokens = torch.randint(0, 70, (ROWS * LENGTH,), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(LENGTH).repeat(ROWS)
    order = torch.cat([torch.randperm(LENGTH, generator=torch.Generator().manual_seed(s)) + s * LENGTH for s in (0, 1)])
    attend = dense(masks()["full"], 2)
    straight, shuffled = model(tokens, positions, attend), model(tokens[order], positions[order], attend)
    assert torch.allclose(shuffled, straight[order], atol=1e-4)


def test_attend_is_called_once_a_layer_with_the_shapes_it_promises(tmp_path: Path) -> None:
    config, seen = config_of(6, 2), []
    model = ours(config, qwen2(config), tmp_path)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append((layer, tuple(q.shape), tuple(k.shape), tuple(v.shape)))
        return q

    model(torch.zeros(5, dtype=torch.long), torch.arange(5), attend)
    assert seen == [(layer, (5, 6, 8), (5, 2, 8), (5, 2, 8)) for layer in range(3)]
