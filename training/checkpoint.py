"""Write the embedded models as checkpoints: two configuration files, model.safetensors and tokenizer files."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from lopa_dist.models.config import ModelConfig

ARCHITECTURES = {"Dream": "DreamModel", "lopa_causal": "Qwen2ForCausalLM"}
"""Each family's entry of `architectures` in `config.json`. A causal model is a Qwen2 that can also draft with masks."""


def config_json(config: ModelConfig) -> dict[str, object]:
    """Return the content of `config.json`; for the family Dream, any implementation of Dream can read it."""
    return {
        "model_type": config.family,
        "architectures": [ARCHITECTURES[config.family]],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "use_sliding_window": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": config.tied,
        "max_position_embeddings": config.max_positions,
        "mask_token_id": config.mask_id,
        "eos_token_id": config.eos_ids[0],
        "pad_token_id": config.pad_id,
        "torch_dtype": "bfloat16",
    }


def generation_config(config: ModelConfig) -> dict[str, object]:
    """Return the content of `generation_config.json`, without which Dream's published code loads no checkpoint."""
    return {
        "bos_token_id": config.eos_ids[0],
        "eos_token_id": config.eos_ids[0],
        "mask_token_id": config.mask_id,
        "pad_token_id": config.pad_id,
    }


def save(folder: Path, config: ModelConfig, weights: dict[str, Tensor], tokenizer: PreTrainedTokenizerFast) -> None:
    """Write a checkpoint into `folder`, with the weights rounded to bf16."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("config", config_json(config)), ("generation_config", generation_config(config))):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    kept = {name: w for name, w in weights.items() if not (config.tied and name == "lm_head.weight")}
    rounded = {name: w.detach().to(torch.bfloat16).contiguous() for name, w in kept.items()}
    save_file(rounded, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(folder)
