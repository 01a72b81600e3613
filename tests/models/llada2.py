"""A small random LLaDA2 checkpoint under the published names, and what the authors' own code made of it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tests.models.small_checkpoints import HF, VOCABULARY, Kind

LOGITS = Path(__file__).parent / "llada2_logits.npy"
"""``[LENGTH, VOCABULARY]`` under the block-causal mask of blocks of `BLOCK`, by ``scripts/llada2_logits.py``."""
LENGTH, BLOCK = 26, 6
TEXTS = Path(__file__).parent / "llada2_texts.json"
"""By setting, answers of the authors' `generate`, by ``scripts/llada2_texts.py``."""
EXPERTS, SIZE = 16, 32
EOS, MASK = 78, 79


class Setting(NamedTuple):
    """One way in which the authors decode."""

    prompts: int
    sharpness: float  # of the head's weights, so that probabilities lie on both sides of the thresholds
    tau_conf: float
    tau_edit: float | None  # null: LLaDA2.0


SETTINGS = (
    Setting(100, 3.0, 0.95, None),
    Setting(100, 3.0, 0.7, 0.5),
    Setting(30, 3.0, 0.95, 0.9),
    Setting(30, 2.0, 0.5, 0.0),
)


CONFIG = {key: value for key, value in HF.items() if key != "eos_token_id"} | {
    "model_type": "llada2_moe", "num_hidden_layers": 3, "head_dim": 16, "partial_rotary_factor": 0.5, "rotary_dim": 8,
    "rope_theta": 600_000.0, "num_experts": EXPERTS, "num_experts_per_tok": 4, "moe_intermediate_size": SIZE,
    "num_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
    "score_function": "sigmoid", "router_dtype": "fp32", "norm_topk_prob": True, "norm_head": False,
    "norm_softmax": False, "moe_router_enable_expert_bias": True, "use_bias": False, "use_qkv_bias": False,
    "use_qk_norm": True, "pad_token_id": EOS, "mask_token_id": MASK, "sliding_window": 4096,
}  # fmt: skip
KIND = Kind(CONFIG, reference=lambda **sizes: None)  # type: ignore[arg-type, return-value]


def tokens() -> Tensor:
    """``[LENGTH]``."""
    return torch.from_numpy(np.random.RandomState(1).randint(0, VOCABULARY - 1, LENGTH))


def weights(sharpness: float = 1.0) -> dict[str, Tensor]:
    """All tensors; numbers of numpy's frozen generator, so that they are the same everywhere."""
    draw = np.random.RandomState(0)

    def matrix(rows: int, columns: int, scale: float = 1.5) -> Tensor:
        return torch.from_numpy((draw.standard_normal((rows, columns)) * scale * columns**-0.5).astype(np.float32))

    def norm(size: int) -> Tensor:
        return torch.from_numpy((1 + 0.3 * draw.standard_normal(size)).astype(np.float32))

    def mlp(at: str, size: int) -> dict[str, Tensor]:
        shapes = {"gate_proj": (size, 48), "up_proj": (size, 48), "down_proj": (48, size)}
        return {f"{at}.{name}.weight": matrix(*shape) for name, shape in shapes.items()}

    found = {"model.word_embeddings.weight": matrix(VOCABULARY, 48, 48**0.5), "lm_head.weight": matrix(VOCABULARY, 48)}
    found["model.norm.weight"] = norm(48)
    for layer in range(3):
        at = f"model.layers.{layer}"
        found[f"{at}.input_layernorm.weight"] = norm(48)
        found[f"{at}.post_attention_layernorm.weight"] = norm(48)
        found[f"{at}.attention.query_key_value.weight"] = matrix((4 + 2 * 2) * 16, 48)
        found[f"{at}.attention.query_layernorm.weight"] = norm(16)
        found[f"{at}.attention.key_layernorm.weight"] = norm(16)
        found[f"{at}.attention.dense.weight"] = matrix(48, 64)
        if layer == 0:
            found |= mlp(f"{at}.mlp", 112)
            continue
        found[f"{at}.mlp.gate.weight"] = matrix(EXPERTS, 48)
        found[f"{at}.mlp.gate.expert_bias"] = torch.from_numpy(draw.standard_normal(EXPERTS).astype(np.float32) * 0.2)
        found |= mlp(f"{at}.mlp.shared_experts", SIZE)
        for expert in range(EXPERTS):
            found |= mlp(f"{at}.mlp.experts.{expert}", SIZE)
    found["lm_head.weight"] *= sharpness
    return found
