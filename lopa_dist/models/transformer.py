"""The transformer: one module for every family, over packed rows, with attention passed in from outside.

It knows nothing of sequences, branches or caches: a row is a token at a position, and `attend` decides what it sees.
Checkpoints are loaded into it, training runs it with dense masked attention, and engines run its weights in the form of
`fused`. The layout is LLaMA's with options: biases on q, k and v (Qwen2), normalised q and k (Qwen3), and experts
instead of a feed-forward (Qwen3-MoE). Parameters have transformers' names for those models; `families.py` has the other
names that checkpoints use.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lopa_dist.kernels.product import Linear
from lopa_dist.kernels.rope import apply_rope, rope_table
from lopa_dist.kernels.rows import rms_norm
from lopa_dist.models.config import ModelConfig
from lopa_dist.models.experts import SparseMLP
from lopa_dist.models.mask_rows import MaskRows

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``(layer, q [R, H, D], k [R, Hkv, D], v [R, Hkv, D]) -> [R, H, D]``"""


def rope_of(config: ModelConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return `rope_table` of ``positions [R]``, in the weights' `dtype` unless the model rotates in fp32."""
    dtype = torch.float32 if config.rope_fp32 else dtype
    return rope_table(positions, config.head_dim, config.rope_theta, dtype, config.rope_scaling, config.rotated)


def query_scale_of(config: ModelConfig, positions: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return the factors of rotated queries at ``positions [R]``, ``[R, 1, 1]``; None: they stay as they are."""
    return None if config.query_scaling is None else config.query_scaling(positions).to(dtype)[:, None, None]


class RMSNorm(nn.Module):
    """`rms_norm` with its weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """The projections of grouped-query attention, around `attend`."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        d, q, kv = config.hidden_size, config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = Linear(d, q, bias=config.qkv_bias)
        self.k_proj = Linear(d, kv, bias=config.qkv_bias)
        self.v_proj = Linear(d, kv, bias=config.qkv_bias)
        self.o_proj = Linear(q, d, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.rms_eps) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        q = apply_rope(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), *rope)  # [R, H, D]
        k = apply_rope(self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim))), *rope)  # [R, Hkv, D]
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        return self.o_proj(attend(self.layer, q, k, v).flatten(-2))


class MLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and feed-forward, each after its norm and added to the residual."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_eps)
        experts = config.experts
        if experts is None or layer < experts.dense_layers:
            self.mlp: MLP | SparseMLP = MLP(config.hidden_size, config.intermediate_size)
        else:
            shared = MLP(config.hidden_size, experts.shared) if experts.shared else None
            self.mlp = SparseMLP(config.hidden_size, experts, shared)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Return the layer's output: ``[R, d] -> [R, d]``."""
        x = x + self.self_attn(self.input_layernorm(x), rope, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    """Everything below the LM head; the `model.` in the checkpoint's names."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        embedding = torch.empty(config.vocab_size, config.hidden_size)
        if not embedding.is_meta:  # on meta, drawing numbers would take a second to import torch._dynamo, for nothing
            nn.init.normal_(embedding)
        self.embed_tokens = nn.Embedding.from_pretrained(embedding, freeze=False)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_eps)


class Transformer(nn.Module):
    """``tokens [R], positions [R] -> hidden [R, d]``; `head_weight` turns chosen rows into logits."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.mask_rows: MaskRows | None = None  # of an adapter that acts on rows of masks only
        self.adapters = 0  # how many such adapters it has had
        self.model = Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def head_weight(self) -> Tensor:
        """Return the LM head's weight, ``[vocabulary, d]``."""
        return self.lm_head.weight

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return hidden states after the final norm, ``[R, d]``."""
        dtype = self.model.embed_tokens.weight.dtype
        rope, scale = rope_of(self.config, positions, dtype), query_scale_of(self.config, positions, dtype)
        if scale is None:
            return self.rotated(tokens, rope, attend)
        return self.rotated(tokens, rope, lambda layer, q, k, v: attend(layer, q * scale, k, v))

    def rotated(self, tokens: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Compute `forward` with the positions' table made in advance, for a model whose queries are not scaled."""
        if self.mask_rows is not None:
            self.mask_rows.begin(tokens == self.config.mask_id)
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, rope, attend)
        return self.model.norm(x)
