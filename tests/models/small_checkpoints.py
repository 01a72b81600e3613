"""Small random checkpoints of every family, in the files and names of the published ones.

Configurations and names are written out here, from the published files, so that they check the family table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

Model = TypeVar("Model", bound=PreTrainedModel)
VOCABULARY = 80
HF = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 112,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "rope_scaling": None,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "eos_token_id": 78,
    "torch_dtype": "float32",
}
LLADA = {
    "activation_type": "silu",
    "alibi": False,
    "attention_layer_norm": False,
    "bias_for_layer_norm": False,
    "block_group_size": 1,
    "block_type": "llama",
    "d_model": 48,
    "embedding_size": VOCABULARY,
    "eos_token_id": 78,
    "include_bias": False,
    "include_qkv_bias": False,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "mask_token_id": 79,
    "max_sequence_length": 256,
    "mlp_hidden_size": 112,
    "mlp_ratio": 4,
    "model_type": "llada",
    "multi_query_attention": None,
    "n_heads": 4,
    "n_kv_heads": 4,
    "n_layers": 2,
    "pad_token_id": 78,
    "rms_norm_eps": 1e-5,
    "rope": True,
    "rope_theta": 500_000.0,
    "scale_logits": False,
    "vocab_size": VOCABULARY,
    "weight_tying": False,
}
LLADA_NAMES = {
    "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "attn_out",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ff_norm",
}


def llada_name(name: str) -> str:
    """LLaMA's name of a tensor -> LLaDA's."""
    block = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
    if block:
        return f"model.transformer.blocks.{block[1]}.{LLADA_NAMES[block[2]]}.weight"
    top = {"model.embed_tokens": "wte", "model.norm": "ln_f", "lm_head": "ff_out"}
    return f"model.transformer.{top[name.removesuffix('.weight')]}.weight"


@dataclass(frozen=True)
class Kind:
    """One family's small checkpoint and the transformers model that computes the same."""

    config: dict[str, Any]
    reference: Callable[..., PreTrainedModel]
    sizes: dict[str, Any] = field(default_factory=dict)  # of the reference, where they are not under HF's keys
    rename: Callable[[str], str] = str


def ministral3(rope_theta: float, **sizes: Any) -> PreTrainedModel:
    """Without the base of the rotation, which is among its parameters."""
    module = pytest.importorskip("transformers.models.ministral3", reason="transformers before 5.0")
    return module.Ministral3ForCausalLM(module.Ministral3Config(**sizes, sliding_window=None))


KINDS = {
    "dream": Kind(
        HF
        | {"model_type": "Dream", "mask_token_id": 79, "pad_token_id": 78, "use_mrope": False, "sliding_window": None},
        lambda **sizes: Qwen2ForCausalLM(Qwen2Config(**sizes)),
    ),
    "llada": Kind(
        LLADA,
        lambda **sizes: LlamaForCausalLM(LlamaConfig(**sizes)),
        {"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0},
        llada_name,
    ),
    "illada": Kind(  # config.json names no mask token
        HF
        | {"model_type": "illada", "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False}
        | {"layer_norm_eps": None, "pad_token_id": 0},
        lambda **sizes: LlamaForCausalLM(LlamaConfig(**sizes)),
    ),
    "sdar": Kind(
        HF | {"model_type": "sdar", "head_dim": 16, "attention_bias": False, "mask_token_id": 79, "block_size": 4},
        lambda **sizes: Qwen3ForCausalLM(Qwen3Config(**sizes)),
        {"head_dim": 16},
    ),
    "fast_dllm_v2": Kind(
        HF
        | {"model_type": "Fast_dLLM_Qwen", "bd_size": 8, "tie_word_embeddings": True, "mask_token_id": 79}
        | {"pad_token_id": 78, "layer_types": ["full_attention"] * 2},
        lambda **sizes: Qwen2ForCausalLM(Qwen2Config(**sizes)),
    ),
}

SAME_KINDS = {
    "stable_diffcoder": Kind(  # its model_type is everybody's, and config.json names no mask token
        HF
        | {"model_type": "llama", "attention_bias": False, "mlp_bias": False, "layer_norm_eps": None, "pad_token_id": 1}
        | {"auto_map": {"AutoModelForCausalLM": "modeling_seed_diffcoder.SeedDiffcoderForCausalLM"}},
        lambda **sizes: LlamaForCausalLM(LlamaConfig(**sizes)),
    ),
    "a2d_qwen3": Kind(
        HF
        | {"model_type": "a2d-qwen3", "head_dim": 16, "attention_bias": False, "tie_word_embeddings": True}
        | {"block_size": 0, "mask_token_id": 79},
        lambda **sizes: Qwen3ForCausalLM(Qwen3Config(**sizes)),
        {"head_dim": 16},
    ),
    "a2d_qwen2_bd3lm": Kind(
        HF | {"model_type": "a2d-qwen2", "block_size": 8, "mask_token_id": 79},
        lambda **sizes: Qwen2ForCausalLM(Qwen2Config(**sizes)),
    ),
}
"""Families whose arithmetic and decoding are those of one in `KINDS`."""
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {  # of its 8 frequencies the first is kept, the second between, the others divided; 26 tokens are beyond
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
    "mscale_all_dim": 1.0, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
MOE_KINDS = {
    "sdar_moe": Kind(
        HF | {"model_type": "sdar_moe", "head_dim": 16, "mask_token_id": 79, "block_size": 4} | EXPERTS,
        lambda **sizes: Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)),
        {"head_dim": 16} | EXPERTS,
    ),
    "rnd1": Kind(
        HF
        | {"model_type": "rnd1", "attention_bias": False, "head_dim": 16, "mask_token_id": 79}
        | EXPERTS
        | {"norm_topk_prob": False},
        lambda **sizes: Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)),
        {"head_dim": 16} | EXPERTS | {"norm_topk_prob": False},
    ),
}
"""Mixtures of experts."""
CAUSAL_KINDS = {
    "i_dlm": Kind(
        HF | {"model_type": "sdar", "head_dim": 16, "attention_bias": False, "mask_token_id": 79, "block_size": 3},
        lambda **sizes: Qwen3ForCausalLM(Qwen3Config(**sizes)),
        {"head_dim": 16},
    ),
    "qwen2": Kind(
        HF | {"model_type": "qwen2", "tie_word_embeddings": True, "sliding_window": 131072, "max_window_layers": 2},
        lambda **sizes: Qwen2ForCausalLM(Qwen2Config(**sizes)),
    ),
    "qwen3": Kind(
        HF | {"model_type": "qwen3", "head_dim": 16, "attention_bias": False, "layer_types": ["full_attention"] * 2},
        lambda **sizes: Qwen3ForCausalLM(Qwen3Config(**sizes)),
        {"head_dim": 16},
    ),
    "nemotron": Kind(  # without a rope_scaling, and with the rotation's base among the parameters
        {key: value for key, value in HF.items() if key not in ("rope_theta", "rope_scaling")}
        | {"model_type": "nemotron_labs_diffusion", "architectures": ["NemotronLabsDiffusionModel"], "head_dim": 16}
        | {"attention_bias": False, "mlp_bias": False, "sliding_window": None, "mask_token_id": 79, "block_size": 32}
        | {"dlm_paradigm": "bidirectional", "ar_loss_weight": 1.0, "dlm_loss_weight": None, "rope_parameters": YARN},
        lambda **sizes: ministral3(**sizes),
        {"head_dim": 16, "rope_parameters": YARN},
        lambda name: name.replace("model.", "encoder.").replace("lm_head", "diffusion_head"),
    ),
    "llama2": Kind(  # without the base of the rotation, which nobody had changed yet
        {key: value for key, value in HF.items() if key != "rope_theta"} | {"model_type": "llama", "pretraining_tp": 1},
        lambda **sizes: LlamaForCausalLM(LlamaConfig(**sizes)),
        {"rope_theta": 10_000.0},
    ),
    "llama": Kind(
        HF | {"model_type": "llama", "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1},
        lambda **sizes: LlamaForCausalLM(LlamaConfig(**sizes)),
    ),
    "llama3": Kind(
        HF | {"model_type": "llama", "attention_bias": False, "mlp_bias": False, "rope_scaling": LLAMA3},
        lambda **sizes: LlamaForCausalLM(LlamaConfig(**sizes)),
        {"rope_scaling": LLAMA3},
    ),
}
"""Every row sees what is before it."""


def reference(kind: Kind) -> PreTrainedModel:
    """The transformers model, with weights so large that attention, biases and norms matter."""
    keys = (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "intermediate_size", "max_position_embeddings", "rms_norm_eps", "rope_theta",
    )  # fmt: skip
    tied = kind.config.get("tie_word_embeddings", False)
    sizes = {k: HF[k] for k in keys} | kind.sizes
    model = kind.reference(**sizes, tie_word_embeddings=tied, attn_implementation="eager", pad_token_id=None)
    return enlarged(model)


def enlarged(model: Model) -> Model:
    """The model with random weights, so large that attention, biases and norms matter."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if "norm" in name:
                p.copy_(1 + 0.3 * noise)
            elif p.ndim == 1:
                p.copy_(0.5 * noise)
            else:
                p.copy_(noise if "embed" in name else 1.5 * noise * p.shape[-1] ** -0.5)
    return model.eval()


def weights_of(kind: Kind, model: PreTrainedModel) -> dict[str, Tensor]:
    """The model's tensors as the family's checkpoints have them."""
    weights = {kind.rename(n): w.clone() for n, w in unstacked(model.state_dict()).items()}
    if kind.config.get("tie_word_embeddings"):
        del weights["lm_head.weight"]
    return weights


def unstacked(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts' weights one by one, as checkpoints have them; newer transformers stack them in the model."""
    found = {}
    for name, weight in weights.items():
        if name.endswith("experts.gate_up_proj"):
            for number, one in enumerate(weight):
                gate, up = one.chunk(2)
                found[name.replace("gate_up_proj", f"{number}.gate_proj.weight")] = gate.clone()
                found[name.replace("gate_up_proj", f"{number}.up_proj.weight")] = up.clone()
        elif name.endswith("experts.down_proj"):
            for number, one in enumerate(weight):
                found[name.replace("down_proj", f"{number}.down_proj.weight")] = one.clone()
        else:
            found[name] = weight
    return found


def write(folder: Path, kind: Kind, weights: dict[str, Tensor], shards: int = 1) -> Path:
    """A checkpoint folder without a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(kind.config))
    save(folder, dict(sorted(weights.items())), shards)
    return folder


def save(folder: Path, weights: dict[str, Tensor], shards: int) -> None:
    """One safetensors file, or the tensors dealt out in turn over several and their index."""
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return
    (folder / "model.safetensors").unlink(missing_ok=True)
    names = list(weights)
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    for i, file in enumerate(files):
        save_file({n: weights[n] for n in names[i::shards]}, folder / file)
    index = {"metadata": {"total_size": 0}, "weight_map": {n: files[i % shards] for i, n in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
