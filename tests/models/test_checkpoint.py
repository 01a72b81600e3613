"""Checkpoints load whole or not at all, and what stands in the way is named."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import save_file
from torch import Tensor

from lopa_dist.models.checkpoint import load_model, places
from lopa_dist.models.config import ModelConfig
from lopa_dist.models.config_file import read_config
from lopa_dist.models.families import check_drafts
from lopa_dist.models.files import EMBEDDED, CheckpointError, find, weight_files
from lopa_dist.models.tokenizer import load_tokenizer, special_tokens
from lopa_dist.models.transformer import Transformer
from tests.conftest import SMALL
from tests.models import small_checkpoints
from training import tokenizer
from training.checkpoint import config_json, save

CPU = torch.device("cpu")


def config_of(tied: bool = False) -> ModelConfig:
    return replace(
        SMALL, vocab_size=32, hidden_size=16, head_dim=4, intermediate_size=24, tied=tied, mask_id=1, eos_ids=(2,),
        pad_id=3, max_positions=64,
    )  # fmt: skip


def weights_of(config: ModelConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights = {n: torch.randn(p.shape, generator=generator) for n, p in Transformer(config).state_dict().items()}
    if config.tied:
        del weights["lm_head.weight"]
    return weights


def write(folder: Path, config: ModelConfig, weights: dict[str, Tensor], shards: int = 1) -> Path:
    (folder / "config.json").write_text(json.dumps(config_json(config)))
    small_checkpoints.save(folder, weights, shards)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good checkpoint."""
    return write(tmp_path, config_of(), weights_of(config_of()))


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of config.json; ``...`` removes one."""
    file = folder / "config.json"
    raw = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in raw.items() if v is not ...}))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_every_tensor_arrives(shards: int, tied: bool, tmp_path: Path) -> None:
    config = config_of(tied)
    weights = weights_of(config)
    model = load_model(write(tmp_path, config, weights, shards), torch.float32, CPU)
    assert model.config == config
    loaded = model.state_dict()
    assert set(loaded) == set(weights) | {"lm_head.weight"}
    assert all(torch.equal(loaded[n], w) for n, w in weights.items())
    assert (model.head_weight is model.model.embed_tokens.weight) == tied
    assert not any(p.requires_grad or p.is_meta for p in model.parameters())
    assert not model.training


@pytest.mark.parametrize("tied", [False, True])
def test_a_file_that_is_overwritten_changes_no_loaded_weight(tied: bool, tmp_path: Path) -> None:
    """A trainer may save into the folder of the model that a job runs, in place."""
    config = config_of(tied)
    model = load_model(write(tmp_path, config, weights_of(config)), torch.float32, CPU)
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as content:
        content.write(bytes(file.stat().st_size))
    loaded = model.state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in weights_of(config).items())


def test_tensors_are_cast_to_what_is_asked_for(folder: Path) -> None:
    model = load_model(folder, torch.bfloat16, CPU)
    weights = weights_of(config_of())
    assert all(torch.equal(p, weights[n].bfloat16()) for n, p in model.state_dict().items())


@pytest.mark.parametrize("tied", [False, True])
def test_what_embedded_saves_is_loaded_back(tied: bool, tmp_path: Path) -> None:
    config, words = config_of(tied), tokenizer.build()
    weights = Transformer(config).state_dict()
    save(tmp_path / "new" / "folder", config, weights, words)
    model = load_model(tmp_path / "new" / "folder", torch.float32, CPU)
    assert model.config == config
    assert all(torch.equal(p, weights[n].bfloat16().float()) for n, p in model.state_dict().items())
    loaded = load_tokenizer(tmp_path / "new" / "folder")
    text = "<|user|> Alice has 7 apples . Zürich<|assistant|>"
    assert loaded.encode(text) == words.encode(text)
    assert (loaded.mask_token_id, loaded.eos_token_id, loaded.pad_token_id) == (1, 0, 0)
    assert loaded.chat_template == tokenizer.CHAT_TEMPLATE


def test_head_dim_and_several_eos_of_the_config(folder: Path) -> None:
    edit_config(folder, head_dim=12, eos_token_id=[2, 9])
    config = read_config(folder)
    assert (config.head_dim, config.eos_ids) == (12, (2, 9))
    edit_config(folder, head_dim=None, eos_token_id=7, tie_word_embeddings=...)
    config = read_config(folder)
    assert (config.head_dim, config.eos_ids, config.tied) == (4, (7,), False)


def missing(weights: dict[str, Tensor]) -> str:
    del weights["model.layers.1.mlp.up_proj.weight"]
    return r"1 tensors missing: model\.layers\.1\.mlp\.up_proj\.weight"


def missing_head(weights: dict[str, Tensor]) -> str:
    del weights["lm_head.weight"]
    return r"missing: lm_head\.weight"


def unknown(weights: dict[str, Tensor]) -> str:
    weights["model.layers.0.self_attn.q_norm.weight"] = torch.ones(4)
    return r"1 tensors not known: model\.layers\.0\.self_attn\.q_norm\.weight"


def misshaped(weights: dict[str, Tensor]) -> str:
    weights["model.norm.weight"] = torch.ones(17)
    return r"wrong shape: model\.norm\.weight \[17\] instead of \[16\]"


def another_model(weights: dict[str, Tensor]) -> str:
    for name in list(weights):
        weights["transformer." + name] = weights.pop(name)
    return r"27 tensors missing: .*lm_head\.weight"


@pytest.mark.parametrize("spoil", [missing, missing_head, unknown, misshaped, another_model])
@pytest.mark.parametrize("shards", [1, 2])
def test_the_tensors_in_the_way_are_named(
    spoil: Callable[[dict[str, Tensor]], str], shards: int, tmp_path: Path
) -> None:
    weights = weights_of(config_of())
    message = spoil(weights)
    write(tmp_path, config_of(), weights, shards)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(tmp_path, torch.float32, CPU)
    assert str(tmp_path) in str(caught.value)
    assert "fetch the checkpoint again, or correct" in str(caught.value)


def test_a_tied_heads_copy_may_stand_in_the_file_but_no_other(tmp_path: Path) -> None:
    config = config_of(tied=True)
    weights = weights_of(config)
    copy = weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    for name in ("copy", "other"):
        (tmp_path / name).mkdir()
    write(tmp_path / "copy", config, copy, 2)
    assert load_model(tmp_path / "copy", torch.float32, CPU).config.tied
    copy["lm_head.weight"][3, 1] += 1
    write(tmp_path / "other", config, copy, 2)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is not model\.embed_tokens\.weight\. Set tie_word_emb"):
        load_model(tmp_path / "other", torch.float32, CPU)


@pytest.mark.parametrize("model_type", ["mistral", None])
def test_an_unknown_model_type_names_the_known_ones(model_type: str | None, folder: Path) -> None:
    edit_config(folder, model_type=model_type)
    with pytest.raises(CheckpointError, match=rf"{model_type!r} is not known; known: .*Dream"):
        load_model(folder, torch.float32, CPU)


def test_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json") as caught:
        load_model(folder, torch.float32, CPU)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("key", ["mask_token_id", "rope_theta", "eos_token_id", "hidden_size"])
def test_a_key_that_the_config_lacks_is_named(key: str, folder: Path) -> None:
    edit_config(folder, **{key: ...})
    with pytest.raises(CheckpointError, match=key):
        read_config(folder)


@pytest.mark.parametrize("named", ["<|end|>", {"content": "<|end|>", "special": True}])
def test_what_ends_an_answer_may_stand_with_the_tokenizer_alone(named: Any, folder: Path) -> None:
    edit_config(folder, eos_token_id=None)
    with pytest.raises(CheckpointError, match="the tokenizer names no eos_token: set it to the id"):
        read_config(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
    (folder / "added_tokens.json").write_text('{"<|end|>": 11}')
    assert read_config(folder).eos_ids == (11,)


def test_a_config_that_is_no_json(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "Dream",')
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_config(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin"])
def test_pickles_are_refused(name: str, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(weights_of(config_of()), folder / name)
    with pytest.raises(CheckpointError, match=r"pickle.*refused.*safetensors"):
        load_model(folder, torch.float32, CPU)


def test_no_weights_at_all(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors missing") as caught:
        load_model(folder, torch.float32, CPU)
    assert "pickle" not in str(caught.value)


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    write(tmp_path, config_of(), weights_of(config_of()), shards=3)
    assert [f.name[:11] for f in weight_files(tmp_path)] == ["model-00001", "model-00002", "model-00003"]
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors missing; fetch the checkpoint again"):
        load_model(tmp_path, torch.float32, CPU)


def test_a_truncated_file_is_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_model(folder, torch.float32, CPU)


def test_a_broken_index_is_named(tmp_path: Path) -> None:
    write(tmp_path, config_of(), weights_of(config_of()), shards=2)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"index\.json"):
        load_model(tmp_path, torch.float32, CPU)


def test_no_tokenizer(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        load_tokenizer(folder)


def test_find_takes_folders_as_they_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find(str(folder)) == folder
    monkeypatch.chdir(folder.parent)
    assert find(folder.name).resolve() == folder
    assert find("embedded") == EMBEDDED


@pytest.mark.parametrize("path", ["/no/such/folder", "./no_such_folder", "../no_such_folder"])
def test_a_missing_folder_is_not_looked_for_on_the_hub(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(CheckpointError, match=rf"model\.path={path}: no such folder"):
        find(path)


def test_a_hub_id_is_downloaded_without_pickles_and_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.extend([name, *allow_patterns])
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert find("some/model") == tmp_path
    assert asked[0] == "some/model"
    assert "*.safetensors" in asked
    assert not any(pattern.endswith((".bin", ".pt", ".py", "*")) for pattern in asked)


def test_a_hub_that_gives_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, allow_patterns: list[str]) -> str:
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr("lopa_dist.models.files.why_not_there", lambda path: "")
    with pytest.raises(CheckpointError, match=r"model\.path=some/model: .*no network"):
        find("some/model")


def test_a_name_that_can_be_no_hub_id() -> None:
    with pytest.raises(CheckpointError, match=r"model\.path=outputs/embedded/checkpoint"):
        find("outputs/embedded/checkpoint")


def yarn(**changes: Any) -> dict[str, Any]:
    """Nemotron's rotation with other values; ``...`` removes one."""
    return {k: v for k, v in (small_checkpoints.YARN | changes).items() if v is not ...}


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("dream", {"use_sliding_window": True}, "use_sliding_window=True is not supported, only False"),
        ("dream", {"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_scaling of type 'yarn'"),
        ("llada", {"block_type": "sequential"}, "block_type='sequential' is not supported, only 'llama'"),
        ("llada", {"include_qkv_bias": True}, "include_qkv_bias=True"),
        ("illada", {"layer_norm_eps": 1e-5}, "layer_norm_eps"),
        ("sdar", {"attention_bias": True}, "attention_bias=True"),
        ("i_dlm", {"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope_scaling of type 'yarn' is not supported"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4}}, "rope_scaling of type 'linear'"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "llama3", "factor": 4}},
            "rope_parameters and rope_scaling differ",
        ),
        (
            "llama3",
            {
                "rope_parameters": {**small_checkpoints.LLAMA3, "rope_theta": 1e4},
                "rope_scaling": {**small_checkpoints.LLAMA3, "rope_theta": 5e5},
            },
            "rope_parameters and rope_scaling differ",
        ),
        (
            "llama3",
            {"rope_scaling": small_checkpoints.LLAMA3, "original_max_position_embeddings": 7},
            "original_max_position_embeddings is 7 in config.json and",
        ),
        (
            "llama3",
            {"rope_scaling": {**small_checkpoints.LLAMA3, "factor": "8"}},
            "factor='8' must be a positive number",
        ),
        ("llama3", {"rope_scaling": {**small_checkpoints.LLAMA3, "factor": 0}}, "factor=0 must be a positive number"),
        ("llama", {"rope_theta": math.inf}, "rope_theta=inf: must be a positive number"),
        ("llama", {"eos_token_id": "78"}, "eos_token_id='78', here or in generation_config.json: must be the number"),
        ("llama", {"eos_token_id": [78, True]}, "eos_token_id=True, here or"),
        ("llama", {"eos_token_id": [78, -1]}, "eos_token_id=-1, here or"),
        ("llama", {"eos_token_id": 80}, "eos_token_id=80, here .* below vocab_size=80"),
        ("qwen2", {"rope_theta": ...}, "no 'rope_theta' in it"),
        (
            "llama",
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor=0.5 is not supported, only 1.0",
        ),
        ("sdar", {"block_size": "4"}, "block_size='4': must be a number of tokens"),
        ("sdar", {"block_size": ...}, "model_type 'sdar' without block_size: .*and use_regular_causal"),
        ("llama", {"attention_bias": True}, "attention_bias=True"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (
            "llama",
            {"auto_map": {"AutoModelForCausalLM": "mine.Mine"}},
            "model_type 'llama' with auto_map=.*not a plain",
        ),
        ("sdar", {"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope_scaling of type 'yarn'"),
        ("rnd1", {"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported, only 1"),
        ("sdar", {"rope_scaling": {"factor": 8.0}}, "rope_scaling has factor, but no rope_type: set it there"),
        (
            "llama",
            {"rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0}},
            "factor, low_freq_factor, but no rope_type",
        ),
        ("sdar", {"mask_token_id": "<|MASK|>"}, r"mask_token_id='<\|MASK\|>': must be the number of the mask token"),
        ("sdar", {"mask_token_id": True}, "mask_token_id=True: must be the number"),
        ("rnd1", {"num_experts_per_tok": 9}, "num_experts_per_tok=9: must be between 1 and num_experts=8"),
        ("rnd1", {"num_experts_per_tok": 0}, "num_experts_per_tok=0: must be between 1 and num_experts=8"),
        ("rnd1", {"mlp_only_layers": [0]}, "mlp_only_layers=\\[0\\]"),
        ("rnd1", {"norm_topk_prob": ...}, "no 'norm_topk_prob' in it"),
        ("sdar_moe", {"block_size": 3}, "model_type 'sdar_moe' with block_size=3"),
        ("sdar_moe", {"model_type": "llada2_moe_veomni"}, "model_type 'llada2_moe_veomni' is not known"),
        ("llada", {"d_model": ..., "hidden_size": 48, "num_experts": 64}, "no 'd_model' in it"),
        ("sdar", {"model_type": "wedlm"}, "model_type 'wedlm' is not known"),
        ("sdar", {"model_type": "diffusion_gemma"}, "model_type 'diffusion_gemma' is not known"),
        ("nemotron", {"model_type": "nemotron_labs_diffusion_vlm"}, "'nemotron_labs_diffusion_vlm' is not known"),
        ("nemotron", {"model_type": "nemotron_two_tower"}, "model_type 'nemotron_two_tower' is not known"),
        (
            "nemotron",
            {"model_type": "sdar", "use_regular_causal": True},
            "rope_scaling of type 'yarn' is not supported",
        ),
        ("nemotron", {"rope_parameters": yarn(rope_type="default")}, "type 'default' is not supported, only 'yarn'"),
        ("nemotron", {"rope_parameters": yarn(rope_type="longrope")}, "rope_scaling of type 'longrope'"),
        ("nemotron", {"rope_parameters": yarn(attention_factor=1.5)}, "attention_factor=1.5 is not supported"),
        ("nemotron", {"rope_parameters": yarn(truncate=False)}, "truncate=False is not supported, only True"),
        ("nemotron", {"rope_parameters": yarn(mscale=0.5)}, "mscale=0.5 with mscale_all_dim=1.0 is not supported"),
        ("nemotron", {"rope_parameters": yarn(mscale=...)}, "no 'mscale' in it"),
        ("nemotron", {"rope_parameters": yarn(llama_4_scaling_beta=...)}, "no 'llama_4_scaling_beta' in it"),
        ("nemotron", {"rope_parameters": ..., "rope_theta": 1e6}, "type 'default' is not supported, only 'yarn'"),
        ("nemotron", {"mask_token_id": ...}, "no mask_token_id, and the tokenizer has no '<SPECIAL_100>'"),
        ("nemotron", {"sliding_window": 4096}, "sliding_window=4096 is not supported"),
        ("nemotron", {"vision_config": {"hidden_size": 8}}, "vision_config="),
        ("llama3", {"rope_scaling": {**small_checkpoints.LLAMA3, "llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta"),
        ("qwen3", {"mask_token_id": 5, "dlm_type": "llada"}, "model_type 'qwen3' with mask_token_id=5"),
        ("qwen2", {"mask_token_id": 5}, "model_type 'qwen2' with mask_token_id=5: not a plain qwen2 model"),
        ("qwen2", {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types of 'sliding_attention'"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("qwen3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported, only 1.0"),
        ("qwen3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config="),
        ("qwen3", {"model_type": "qwen3_moe"}, "model_type 'qwen3_moe' is not known; known: Dream, "),
    ],
)
def test_variants_that_would_compute_something_else_are_refused(
    kind: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    kinds = small_checkpoints.KINDS | small_checkpoints.CAUSAL_KINDS | small_checkpoints.MOE_KINDS
    small_checkpoints.write(tmp_path, kinds[kind], {})
    read_config(tmp_path)
    edit_config(tmp_path, **change)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_config(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize(
    ("change", "name", "message"),
    [
        ({"block_size": 7}, "a", r"block_size=7 in a: SDAR's blocks are of 4, 8.*use_regular_causal"),
        ({"block_size": 4}, "I-DLM-8B", r"block_size=4 in I-DLM-8B: .*Set use_regular_causal in config\.json"),
        ({"block_size": ...}, "i-dlm-8b", "block_size=4 in i-dlm-8b"),
        ({"block_size": 4}, "models--yifanyu--I-DLM-8B/snapshots/3f", "block_size=4 in yifanyu/I-DLM-8B"),
    ],
)
def test_neither_sdar_nor_i_dlm_is_taken_for_the_other(
    change: dict[str, Any], name: str, message: str, tmp_path: Path
) -> None:
    folder = small_checkpoints.write(tmp_path / name, small_checkpoints.KINDS["sdar"], {})
    edit_config(folder, **change)
    with pytest.raises(CheckpointError, match=message):
        read_config(folder)


@pytest.mark.parametrize("block", [4, 8, 16, 32, 64, ..., 3])
def test_sdar_is_sdar(block: Any, tmp_path: Path) -> None:
    """Also where a parent folder is called otherwise, and with any blocks where config.json says that it is."""
    folder = small_checkpoints.write(tmp_path / "i-dlm" / "SDAR-4B", small_checkpoints.KINDS["sdar"], {})
    edit_config(folder, block_size=block, use_regular_causal=False if block == 3 else ...)
    assert (read_config(folder).family, read_config(folder).block_size) == ("sdar", 4 if block is ... else block)


@pytest.mark.parametrize(
    "change", [{"block_size": block} for block in (1, 2, 3)] + [{"block_size": 4, "use_regular_causal": True}]
)
def test_i_dlm_is_i_dlm(change: dict[str, int], tmp_path: Path) -> None:
    folder = small_checkpoints.write(tmp_path, small_checkpoints.KINDS["sdar"], {})
    edit_config(folder, **change)
    assert (read_config(folder).family, read_config(folder).shift) == ("I-DLM", True)


@pytest.mark.parametrize(
    ("name", "said", "block"),
    [
        ("SDAR-4B-Chat-b32", ..., 32),
        ("SDAR-4B-Chat-b32", 32, 32),
        ("SDAR-8B-Chat-b16-sft", ..., 16),
        ("SDAR-4B-Chat", 8, 8),
        ("TraDo-4B-Instruct", ..., 4),
    ],
)
def test_blocks_of_sdar_checkpoints(name: str, said: Any, block: int, tmp_path: Path) -> None:
    folder = small_checkpoints.write(tmp_path / name, small_checkpoints.KINDS["sdar"], {})
    edit_config(folder, block_size=said)
    assert (read_config(folder).family, read_config(folder).block_size) == ("sdar", block)
    if "b32" in name:
        edit_config(folder, block_size=4)
        with pytest.raises(CheckpointError, match="block_size=4, but the name SDAR-4B-Chat-b32 says 32"):
            read_config(folder)


@pytest.mark.parametrize(
    ("name", "said", "family"),
    [
        ("Qwen3-0.6B-diffusion-mdlm-v0.1", ..., "a2d-qwen3"),
        ("Qwen3-0.6B-diffusion-bd3lm-v0.1", ..., "a2d-qwen3-bd3lm"),
        ("mine", 0, "a2d-qwen3"),
        ("mine", 16, "a2d-qwen3-bd3lm"),
    ],
)
def test_a2d_models_are_told_apart(name: str, said: Any, family: str, tmp_path: Path) -> None:
    folder = small_checkpoints.write(tmp_path / name, small_checkpoints.SAME_KINDS["a2d_qwen3"], {})
    edit_config(folder, block_size=said)
    config = read_config(folder)
    assert (config.family, config.block_size) == (family, 16 if said == 16 else 32)
    edit_config(folder, block_size=...)
    if name == "mine":
        with pytest.raises(CheckpointError, match=r"'a2d-qwen3': neither config\.json nor the name 'mine' says"):
            read_config(folder)


def test_a_familys_own_name_is_a_model_type(tmp_path: Path) -> None:
    folder = small_checkpoints.write(tmp_path, small_checkpoints.SAME_KINDS["a2d_qwen3"], {})
    edit_config(folder, model_type="a2d-qwen3-bd3lm", block_size=16)
    assert (read_config(folder).family, read_config(folder).block_size) == ("a2d-qwen3-bd3lm", 16)


def test_theta_in_rope_parameters(folder: Path) -> None:
    edit_config(folder, rope_theta=..., rope_parameters={"rope_type": "default", "rope_theta": 123.0})
    assert read_config(folder).rope_theta == 123.0


def test_a_model_without_a_mask_token_marks_unfilled_cells_with_an_id_of_no_token(tmp_path: Path) -> None:
    """Also where its tokenizer has tokens after the vocabulary; and it drafts from text alone."""
    kind = small_checkpoints.CAUSAL_KINDS["qwen3"]
    small_checkpoints.write(tmp_path, kind, small_checkpoints.weights_of(kind, small_checkpoints.reference(kind)))
    config, model = read_config(tmp_path), load_model(tmp_path, torch.float32, CPU)
    assert (config.mask_id, config.has_mask) == (config.vocab_size, False)
    with pytest.raises(IndexError):
        model.model.embed_tokens(torch.tensor([config.mask_id]))
    check_drafts(config, 0, draft_from="masks")
    check_drafts(config, 3)
    with pytest.raises(
        ValueError, match=r"decode\.draft_from=masks needs a mask token.*qwen3 models have none.*decode.drafts=0"
    ):
        check_drafts(config, 3, draft_from="masks")
    check_drafts(replace(config, mask_id=79), 3, draft_from="masks")


def test_constants_of_rotations_in_old_files_are_left_out(tmp_path: Path) -> None:
    """Llama 2's files have them."""
    kind = small_checkpoints.CAUSAL_KINDS["llama2"]
    weights = small_checkpoints.weights_of(kind, small_checkpoints.reference(kind))
    small_checkpoints.write(tmp_path, kind, weights | {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(6)})
    assert "inv_freq" not in "".join(load_model(tmp_path, torch.float32, CPU).state_dict())


def test_weights_that_others_have_quantised_are_refused(folder: Path) -> None:
    weights = weights_of(config_of())
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.int8)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is of type I8: .*take the original"):
        load_model(folder, torch.float32, CPU)


def test_an_index_of_other_files_than_the_one_that_is_there_is_refused(tmp_path: Path) -> None:
    """As transformers takes the one file, and other programs the index."""
    write(tmp_path, config_of(), weights_of(config_of()), 2)
    save_file(weights_of(config_of()), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="remove the outdated one"):
        load_model(tmp_path, torch.float32, CPU)


def test_a_word_is_not_taken_for_the_familys_mask(tmp_path: Path) -> None:
    folder = small_checkpoints.write(tmp_path, small_checkpoints.KINDS["illada"], {})
    assert read_config(folder).mask_id == 5
    for vocabulary in ({"&": 5}, [["x", 0.0]] * 5 + [["&", 0.0]]):
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
        with pytest.raises(CheckpointError, match=r"no mask_token_id, the tokenizer has no '<\[MASK\]>', and 5, .*'&'"):
            read_config(folder)
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"<[MASK]>": 5}}}))
    assert read_config(folder).mask_id == 5
    edit_config(folder, mask_token_id=7)
    assert read_config(folder).mask_id == 7


def test_an_end_of_text_may_be_an_ordinary_word(folder: Path) -> None:
    edit_config(folder, eos_token_id=...)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>"}))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"</s>": 6}}}))
    assert read_config(folder).eos_ids == (6,)


def test_the_tokenizer_names_mask_and_end_of_turn(folder: Path) -> None:
    """Ids that config.json has not: SDAR-4B and iLLaDA name no mask there, and no config has the end of a turn."""
    edit_config(folder, mask_token_id=...)
    (folder / "added_tokens.json").write_text(json.dumps({"<|mask|>": 9, "<|im_end|>": 11, "<|im_start|>": 12}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [13, 2]}))
    config = read_config(folder)
    assert config.mask_id == 9
    assert config.eos_ids == (2, 13, 11)
    edit_config(folder, mask_token_id=1, eos_token_id=...)
    assert (read_config(folder).mask_id, read_config(folder).eos_ids) == (1, (13, 2, 11))


def test_files_of_another_tokenizer_do_not_count_beside_tokenizer_json(folder: Path) -> None:
    """An ordinary word would end answers, or be the mask."""
    (folder / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": {"a": 6, "<|im_end|>": 7, "b": 9, "c": 11}}, "added_tokens": []})
    )
    (folder / "added_tokens.json").write_text(json.dumps({"<|mask|>": 9, "<|im_end|>": 11}))
    edit_config(folder, mask_token_id=1, eos_token_id=2)
    assert special_tokens(folder) == {"<|im_end|>": 7}
    assert read_config(folder).eos_ids == (2, 7)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": {"6": {"content": "<|im_end|>"}, "13": {"content": "<|eot_id|>"}}})
    )
    assert special_tokens(folder) == {"<|im_end|>": 7, "<|eot_id|>": 13}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, ()),
        ({"repetition_penalty": 1.0, "num_beams": 1, "suppress_tokens": None, "temperature": 0.7, "top_k": 20}, ()),
        ({"repetition_penalty": 1.05, "bad_words_ids": [[3]]}, ("repetition_penalty=1.05", "bad_words_ids=[[3]]")),
    ],
)
def test_options_that_change_greedy_texts_are_known(
    folder: Path, options: dict[str, Any], told: tuple[str, ...]
) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2} | options))
    assert read_config(folder).not_applied == told


@pytest.mark.parametrize("where", ["tokenizer_config.json", "chat_template.jinja", "several", "nowhere"])
def test_an_autoregressive_model_ends_a_turn_as_its_template_does(tmp_path: Path, where: str) -> None:
    """A base model may go on after a token that only its tokenizer has, as it does in transformers and vLLM."""
    kind = small_checkpoints.CAUSAL_KINDS["qwen3"]
    weights = small_checkpoints.weights_of(kind, small_checkpoints.reference(kind))
    folder = small_checkpoints.write(tmp_path / "base", kind, weights)
    ends = read_config(folder).eos_ids
    (folder / "added_tokens.json").write_text(json.dumps({"<|im_end|>": 11, "<|eot_id|>": 12}))
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    if where == "chat_template.jinja":
        (folder / where).write_text(template)
    elif where != "nowhere":
        several = [{"name": "default", "template": template}, {"name": "tools", "template": "x"}]
        own = several if where == "several" else template
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": own}))
    assert read_config(folder).eos_ids == (ends if where == "nowhere" else (*ends, 11))
    if where == "nowhere":  # a merged adapter's folder may have it
        (tmp_path / "adapter").mkdir()
        (tmp_path / "adapter" / "chat_template.jinja").write_text(template)
        assert read_config(folder, merged=tmp_path / "adapter").eos_ids == (*ends, 11)


def test_names_are_compared_before_weights_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = weights_of(config_of())
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors")
    monkeypatch.setattr(Tensor, "to", lambda *_: pytest.fail("a weight was loaded"))
    with pytest.raises(CheckpointError, match="1 tensors missing"):
        load_model(folder, torch.float32, CPU)


LOAD = """
import sys, torch
from pathlib import Path
from lopa_dist.models.checkpoint import load_model
from lopa_dist.models.files import EMBEDDED
from lopa_dist.parallel.communicator import Solo
def peak():
    with open("/proc/self/status") as lines:
        status = dict(line.split(":", 1) for line in lines)
    return int(status["VmHWM"].split()[0]) * 1024
_, folder, ranks, kind = sys.argv
tensor = Solo()
tensor.size = int(ranks)  # the first of them: loading exchanges nothing
# what torch and others take when they are first used
load_model(EMBEDDED, torch.float32, torch.device("cpu"), quantization=kind)
before = peak()
model = load_model(Path(folder), torch.float16, torch.device("cpu"), None, tensor, kind)
held = [*model.parameters(), *model.buffers()]
print(peak() - before, sum(one.numel() * one.element_size() for one in held))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of memory from /proc")
def test_loading_takes_little_more_memory_than_the_checkpoint(tmp_path: Path) -> None:
    """In a process of its own: 300 MB of bf16 in 4 shards, all of it converted to fp16."""
    sizes = {"hidden_size": 1024, "num_hidden_layers": 10, "num_attention_heads": 8, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 3072, "vocab_size": 16384}
    kind = small_checkpoints.KINDS["dream"]
    kind = replace(kind, config=kind.config | sizes)
    small_checkpoints.write(tmp_path, kind, {})
    with torch.device("meta"):
        shapes = Transformer(read_config(tmp_path)).state_dict()
    weights = {n: torch.full(p.shape, 0.5, dtype=torch.bfloat16) for n, p in shapes.items()}
    small_checkpoints.write(tmp_path, kind, weights, shards=4)
    stored = sum(file.stat().st_size for file in tmp_path.glob("*-of-*.safetensors"))
    assert stored > 250e6
    taken, size = taken_and_held(tmp_path)
    assert size == pytest.approx(stored, rel=0.01)
    assert taken > 0.9 * stored  # else nothing was measured
    assert taken < 1.2 * stored


def taken_and_held(folder: Path, ranks: int = 1, kind: str = "none") -> tuple[int, int]:
    """Bytes that loading took at most, and of the weights then, in a process of its own."""
    command = [sys.executable, "-c", LOAD, str(folder), str(ranks), kind]
    taken, size = map(int, subprocess.check_output(command, text=True).split())
    return taken, size


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of memory from /proc")
def test_a_rank_never_holds_its_quantised_experts_in_full(tmp_path: Path) -> None:
    """300 MB of experts, of which a rank of two keeps half, in eight bits a quarter."""
    kind = small_checkpoints.MOE_KINDS["rnd1"]
    sizes = {"hidden_size": 768, "num_hidden_layers": 4, "num_experts": 64, "moe_intermediate_size": 256}
    kind = replace(kind, config=kind.config | sizes)
    small_checkpoints.write(tmp_path, kind, {})
    with torch.device("meta"):
        shapes = {name: place.shape for name, place in places(Transformer(read_config(tmp_path))).items()}
    weights = {name: torch.full(tuple(shape), 0.5, dtype=torch.bfloat16) for name, shape in shapes.items()}
    small_checkpoints.write(tmp_path, kind, weights, shards=4)
    stored = sum(file.stat().st_size for file in tmp_path.glob("*-of-*.safetensors"))
    assert stored > 290e6
    taken, held = taken_and_held(tmp_path, 2, "int8")
    assert held == pytest.approx(stored / 4, rel=0.05)
    assert 0.8 * held < taken < 0.45 * stored


def test_nothing_is_drawn_for_weights_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device that would import torch._dynamo, a third of a small job's start."""

    def fail(*_: object) -> None:
        raise AssertionError("random numbers for an embedding that is read from a file")

    monkeypatch.setattr(torch.nn.init, "normal_", fail)
    load_model(EMBEDDED, torch.float32, CPU)
