"""Initial weights from which a model soon learns to copy.

From random weights, a small model needs many thousands of steps before it can copy from its prompt. One layer has to
find the neighbour of each token, before another layer can gain anything from a search for the same neighbour in the
prompt. So at the start, the heads of the first layer look at fixed distances, each head writes what it reads, layers
two and three look for rows like their own, and the output layer names the token that a row holds. Training changes all
of these weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch

from lopa_dist.models.transformer import Layer, Transformer

DISTANCES = (-1, 1, -2, 2)  # distances at which the first layer's heads look, in turn
CAUSAL_DISTANCES = (-1, -2, -3, -4)  # the same for causal models, whose rows see nothing after them
FAST = 4  # a head recognises distances by this many of the fastest frequencies of its rotation
SHARPNESS = 6.0
EMBEDDING, HEAD = 0.5, 0.05  # standard deviations of the weights


@torch.no_grad()
def prepare_to_copy(model: Transformer, distances: Sequence[int] = DISTANCES) -> None:
    """Set a model's weights as described above; `distances` are for the first layer's heads, in turn.

    Raises:
        ValueError: heads share K and V, so a head cannot write what it reads.
    """
    config, layers = model.config, cast(Iterable[Layer], model.model.layers)
    if config.kv_heads != config.heads:
        raise ValueError(
            f"train.shape.kv_heads={config.kv_heads}: train.copying needs train.shape.heads={config.heads}"
        )
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=EMBEDDING)
    model.lm_head.weight.copy_(model.model.embed_tokens.weight * (HEAD / EMBEDDING))
    attentions = [layer.self_attn for layer in layers]
    for i, attention in enumerate(attentions):
        torch.nn.init.orthogonal_(attention.v_proj.weight)
        attention.o_proj.weight.copy_(attention.v_proj.weight.T)
        if i in (1, 2):
            attention.k_proj.weight.copy_(attention.q_proj.weight)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            projection.bias.zero_()
    first, half = attentions[0], config.head_dim // 2
    speed = config.rope_theta ** (-torch.arange(FAST, dtype=torch.float32) / half)
    for head in range(config.heads):
        angle = distances[head % len(distances)] * speed
        start = head * config.head_dim
        first.q_proj.bias[start : start + FAST] = SHARPNESS * angle.cos()
        first.q_proj.bias[start + half : start + half + FAST] = SHARPNESS * angle.sin()
        first.k_proj.bias[start : start + FAST] = SHARPNESS
    first.q_proj.weight.mul_(0.1)
    first.k_proj.weight.mul_(0.1)
