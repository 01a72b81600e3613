"""What a checkpoint's files say is read, and what would compute something else is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lopa_dist.models.checkpoint import load_model
from lopa_dist.models.config_file import read_config
from lopa_dist.models.families import check_drafts
from lopa_dist.models.files import CheckpointError
from lopa_dist.models.tokenizer import special_tokens
from tests.models import small_checkpoints
from tests.models.one_checkpoint import edit_config

CPU = torch.device("cpu")


def test_head_dim_and_several_eos_of_the_config(folder: Path) -> None:
    edit_config(folder, head_dim=12, eos_token_id=[2, 9])
    config = read_config(folder)
    assert (config.head_dim, config.eos_ids) == (12, (2, 9))
    edit_config(folder, head_dim=None, eos_token_id=7, tie_word_embeddings=...)
    config = read_config(folder)
    assert (config.head_dim, config.eos_ids, config.tied) == (4, (7,), False)


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
                "rope_theta": 5e5,
            },
            "rope_theta is 500000.0 and 10000.0 in config.json, its rope_parameters or rope_scaling",
        ),
        ("llama", {"rope_parameters": {"rope_theta": 3.0}, "rope_theta": 4.0}, "rope_theta is 4.0 and 3.0 in"),
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
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default", "partial_rotary_factor": 0.5}},
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
