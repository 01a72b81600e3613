"""What the transformer needs to know of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelConfig:
    """Shape and conventions of one diffusion language model.

    `family` is a key of `families.FAMILIES`. With `shift`, the row of position p-1 predicts the token at position p.
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
    eos_ids: tuple[int, ...]  # the checkpoint's own first, then its end-of-turn tokens
    pad_id: int
    max_positions: int
    rope_fp32: bool = False  # queries and keys are rotated in fp32, whatever the weights' precision
    qk_norm: bool = False  # queries and keys are normalised per head before the rotation
    block_size: int = 32  # tokens of the blocks it was trained with, or is usually decoded with
