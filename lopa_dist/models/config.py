"""What the transformer needs to know of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelConfig:
    """Shape and conventions of one diffusion language model.

    `shift` is the Dream family's logit shift: the row of position p-1 predicts the token at position p.
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_eps: float
    rope_theta: float
    qkv_bias: bool
    tied: bool
    shift: bool
    mask_id: int
    eos_ids: tuple[int, ...]
    pad_id: int
    max_positions: int
