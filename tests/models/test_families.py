"""Every family computes what transformers computes with the same weights, in every form that the engine uses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lopa_dist.engine.kv_pool import KVPool
from lopa_dist.kernels.segment_attention import Segments, attend_grouped, attend_plain, plan
from lopa_dist.models.checkpoint import load_model
from lopa_dist.models.config_file import read_config
from lopa_dist.models.families import training_pattern
from lopa_dist.models.fused import Cache, FusedTransformer
from lopa_dist.models.transformer import Transformer
from tests.models.small_checkpoints import (
    CAUSAL_KINDS,
    KINDS,
    MOE_KINDS,
    SAME_KINDS,
    VOCABULARY,
    reference,
    weights_of,
    write,
)

CPU = torch.device("cpu")
Pair = tuple[Transformer, PreTrainedModel]
ALL = KINDS | SAME_KINDS | CAUSAL_KINDS | MOE_KINDS
LENGTH, BLOCK = 26, 6
PROMPT = 2 * BLOCK


@pytest.fixture(params=ALL, scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Our model, loaded from files, and the reference."""
    kind = ALL[request.param]
    other = reference(kind)
    folder = write(tmp_path_factory.mktemp(request.param), kind, weights_of(kind, other), shards=2)
    return load_model(folder, torch.float32, CPU), other


def mask_of(name: str, length: int) -> Tensor:
    """Which columns a row sees. With ``full``, a prompt sees itself only, as it does when it is prefilled."""
    place = torch.arange(length)
    if name == "all":
        return torch.ones(length, length, dtype=torch.bool)
    if name == "causal":
        return place[:, None] >= place
    if name == "full":
        return (place[:, None] >= PROMPT) | (place < PROMPT)
    return place[:, None] // BLOCK >= place // BLOCK


def tokens_of(seed: int, length: int = LENGTH) -> Tensor:
    return torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def wanted(model: PreTrainedModel, tokens: Tensor, visible: Tensor) -> Tensor:
    """The reference's logits under a 4-D mask."""
    additive = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    logits = model(input_ids=tokens[None], attention_mask=additive[None, None], use_cache=False).logits[0]
    assert logits.std() > 0.5  # else a difference of 1e-4 says nothing
    return logits


class Part(NamedTuple):
    """A segment of a forward."""

    slot: int
    tokens: Tensor  # of the whole sequence
    shared: int  # rows before it that are cached
    hi: Tensor  # own columns each row sees; its length is the number of rows


@torch.no_grad()
def forward(model: Transformer, pool: KVPool, parts: list[Part], attention: str) -> list[Tensor]:
    """Logits of every part of one packed forward."""
    rows = np.array([len(p.hi) for p in parts])
    start = np.cumsum(rows) - rows
    shared = np.array([p.shared for p in parts])
    pool.reserve(int(rows.sum()))
    slots = np.array([p.slot for p in parts])
    hi = torch.cat([p.hi for p in parts]).numpy()
    segments = Segments(start, rows, pool.base[slots], shared, pool.scratch + start, hi)
    groups = plan(segments, model.config.heads // model.config.kv_heads, CPU, torch.float32)

    def attend(layer: int, q: Tensor) -> Tensor:
        keys, values = pool.keys[layer], pool.values[layer]
        return (
            attend_plain(q, keys, values, segments) if attention == "plain" else attend_grouped(q, keys, values, groups)
        )

    tokens = torch.cat([p.tokens[p.shared : p.shared + len(p.hi)] for p in parts])
    positions = torch.cat([torch.arange(p.shared, p.shared + len(p.hi)) for p in parts])
    cache = Cache(pool.keys, pool.values, pool.scratch)
    logits = FusedTransformer(model)(tokens, positions, None, cache, attend) @ model.head_weight.T
    return list(logits.split(rows.tolist()))


def part(slot: int, tokens: Tensor, visible: Tensor, first: int, last: int) -> Part:
    """Rows [first, last) of a sequence; what is before them is cached."""
    return Part(slot, tokens, first, visible[first:last].sum(1) - first)


def new_pool(model: Transformer, sequences: int = 1) -> KVPool:
    pool = KVPool(model.config, sequences, sequences * LENGTH, torch.float32, CPU)
    assert all(pool.allocate(sequence, LENGTH) for sequence in range(sequences))
    return pool


@pytest.mark.parametrize("attention", ["torch", "plain"])
@pytest.mark.parametrize("mask", ["all", "block_causal", "causal"])
def test_whole_sequence(pair: Pair, mask: str, attention: str) -> None:
    model, other = pair
    tokens, visible = tokens_of(1), mask_of(mask, LENGTH)
    [logits] = forward(model, new_pool(model), [part(0, tokens, visible, 0, LENGTH)], attention)
    assert (logits - wanted(other, tokens, visible)).abs().max() <= 1e-4


@pytest.mark.parametrize("mask", ["full", "block_causal", "causal"])
def test_after_a_cached_prefix(pair: Pair, mask: str) -> None:
    model, other = pair
    tokens, visible, pool = tokens_of(2), mask_of(mask, LENGTH), new_pool(model)
    [before] = forward(model, pool, [part(0, tokens, visible, 0, PROMPT)], "torch")
    pool.store(np.arange(PROMPT), pool.pack(np.arange(PROMPT)))
    [after] = forward(model, pool, [part(0, tokens, visible, PROMPT, LENGTH)], "torch")
    assert (torch.cat([before, after]) - wanted(other, tokens, visible)).abs().max() <= 1e-4


@pytest.mark.parametrize("mask", ["full", "block_causal"])
def test_segments_of_branches_in_one_batch(pair: Pair, mask: str) -> None:
    """Two sequences of unlike length, two branches each that differ by a token, after their own cached prompts."""
    model, other = pair
    pool, parts, expected = new_pool(model, 2), [], []
    for slot, length in enumerate((LENGTH, LENGTH - 5)):
        tokens, visible = tokens_of(3 + slot, length), mask_of(mask, length)
        forward(model, pool, [part(slot, tokens, visible, 0, PROMPT)], "torch")
        pool.store(slot * LENGTH + np.arange(PROMPT), pool.pack(np.arange(PROMPT)))
        for place in (PROMPT, PROMPT + 3):
            branch = tokens.clone()
            branch[place] = (branch[place] + 1) % VOCABULARY
            parts.append(part(slot, branch, visible, PROMPT, length))
            expected.append(wanted(other, branch, visible)[PROMPT:])
    for logits, right in zip(forward(model, pool, parts, "torch"), expected, strict=True):
        assert (logits - right).abs().max() <= 1e-4


@torch.no_grad()
@pytest.mark.parametrize("first", [0, 200])
@pytest.mark.parametrize("pair", CAUSAL_KINDS, indirect=True)
def test_causal_models_compute_what_transformers_does(pair: Pair, first: int) -> None:
    """The plain form, with the reference's own causal mask, at low and high positions."""
    model, other = pair
    tokens, places, group = tokens_of(6), torch.arange(LENGTH), model.config.heads // model.config.kv_heads

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1) for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
        weights = (q @ k.transpose(1, 2) * model.config.head_dim**-0.5).masked_fill(
            places[:, None] < places, -torch.inf
        )
        return (weights.softmax(-1) @ v).transpose(0, 1)

    logits = model(tokens, places + first, attend) @ model.head_weight.T
    right = other(tokens[None], position_ids=places[None] + first, use_cache=False).logits[0]
    assert right.std() > 0.5
    # sums of fp32 in another order: products run in C where an engine has laid out the weights before
    assert (logits - right).abs().max() <= 2e-6 * right.abs().max().clamp(min=5)


def test_conventions(tmp_path: Path) -> None:
    """Shift, pattern and ids of each family, as published."""
    found = {}
    for name, kind in ALL.items():
        config = read_config(write(tmp_path / name, kind, {}))
        at = training_pattern(config)
        found[name] = (
            config.shift, config.mask_id, config.pad_id, at.context, at.block_size,
        )  # fmt: skip
    assert found == {
        "dream": (True, 79, 78, "dual", 32),
        "llada": (False, 79, 78, "dual", 32),
        "illada": (False, 5, 0, "dual", 32),
        "sdar": (False, 79, 78, "blocks", 4),
        "fast_dllm_v2": (True, 79, 78, "blocks", 8),
        "stable_diffcoder": (False, 5, 1, "blocks", 4),
        "a2d_qwen3": (False, 79, 78, "dual", 32),
        "a2d_qwen2_bd3lm": (False, 79, 78, "blocks", 8),
        "i_dlm": (True, 79, 78, "causal", 32),
        "nemotron": (True, 79, 78, "causal", 32),
        "qwen2": (True, 80, 78, "causal", 32),
        "qwen3": (True, 80, 78, "causal", 32),
        "llama": (True, 80, 78, "causal", 32),
        "llama2": (True, 80, 78, "causal", 32),
        "llama3": (True, 80, 78, "causal", 32),
        "sdar_moe": (False, 79, 78, "blocks", 4),
        "rnd1": (True, 79, 78, "dual", 32),
    }
    without = {name for name in ALL if not read_config(tmp_path / name).has_mask}
    assert without == {"qwen2", "qwen3", "llama", "llama2", "llama3"}
    assert [name for name in ALL if read_config(tmp_path / name).rope_fp32] == ["llada"]
    narrow = replace(KINDS["llada"], config=KINDS["llada"].config | {"rope_full_precision": False})
    assert not read_config(write(tmp_path / "narrow", narrow, {})).rope_fp32
    dream = read_config(tmp_path / "dream")
    d2f = training_pattern(replace(dream, block_size=16), "d2f")
    assert (d2f.context, d2f.block_size) == ("d2f", 16)


PUBLISHED = {  # sizes in config.json, and the number of parameters that the model's page gives
    "dream": (
        {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
        | {"intermediate_size": 18944, "vocab_size": 152064},
        7_615_616_512,
    ),
    "llada": (
        {"d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32, "mlp_hidden_size": 12288}
        | {"embedding_size": 126464, "mask_token_id": 126336},
        8_015_581_184,
    ),
    "illada": (
        {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
        | {"intermediate_size": 14336, "vocab_size": 155136},
        7.62e9,
    ),
    "sdar": (
        {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8}
        | {"intermediate_size": 9728, "vocab_size": 151936, "head_dim": 128},
        8.83e9 / 2,
    ),
    "fast_dllm_v2": (
        {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
        | {"intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False},
        7_615_616_512,
    ),
    "stable_diffcoder": (
        {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
        | {"intermediate_size": 14336, "vocab_size": 155136, "head_dim": 128},
        8.25e9,
    ),
    "a2d_qwen3": (
        {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
        | {"intermediate_size": 3072, "vocab_size": 151936, "head_dim": 128},
        0.596e9,
    ),
    "i_dlm": (
        {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8}
        | {"intermediate_size": 12288, "vocab_size": 151936, "head_dim": 128, "mask_token_id": 151669},
        8.19e9,
    ),
    "sdar_moe": (
        {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4}
        | {"intermediate_size": 6144, "vocab_size": 151936, "head_dim": 128, "num_experts": 128}
        | {"num_experts_per_tok": 8, "moe_intermediate_size": 768},
        30.53e9,
    ),
    "llama3": (  # Llama 3.1 8B
        {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
        | {"intermediate_size": 14336, "vocab_size": 128256},
        8_030_261_248,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str, tmp_path: Path) -> None:
    sizes, parameters = PUBLISHED[name]
    config = read_config(write(tmp_path, replace(ALL[name], config=ALL[name].config | sizes), {}))
    with torch.device("meta"):
        model = Transformer(config)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(parameters, rel=1e-3)
