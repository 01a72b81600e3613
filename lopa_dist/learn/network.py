"""The two forwards of learning: of clean rows, without gradients, and of masks that see their K/V."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lopa_dist.learn.attention import clean_attention, group_attention
from lopa_dist.learn.drafts_adapter import DraftsAdapter
from lopa_dist.models.transformer import Transformer, query_scale_of, rope_of
from lopa_dist.rows.lookahead import lead_rows


class Clean(NamedTuple):
    """What the model itself computes for some texts."""

    keys: list[Tensor]  # [B, Hkv, T, D] per layer
    values: list[Tensor]
    hidden: Tensor  # [B, T, d] from which the head predicts the next token


@torch.no_grad()
def clean_forward(model: Transformer, tokens: Tensor) -> Clean:
    """Return what the model computes for texts ``[B, T]``; padding is after them, where none of their rows sees it."""
    keys: list[Tensor] = []
    values: list[Tensor] = []
    count, length = tokens.shape
    positions = torch.arange(length, device=tokens.device).repeat(count)
    hidden = model(tokens.flatten(), positions, clean_attention(count, keys, values))
    return Clean(keys, values, hidden.unflatten(0, (count, length)))


def drafts_forward(
    model: Transformer, adapter: DraftsAdapter, clean: Clean, tokens: Tensor, starts: Tensor, masks: int,
    by_layer: bool = False,
) -> Tensor:  # fmt: skip
    """Run groups of masks after positions of texts.

    Args:
        model: its weights are constants.
        adapter: what masks run with.
        clean: the texts' `clean_forward`.
        tokens: ``[B, T]`` the texts.
        starts: ``[B, G]`` the positions.
        masks: masks per group.
        by_layer: keep only each layer's input, and run the layer again for its gradients.

    Returns:
        The masks' hidden states ``[B, G, n, d]``; mask i predicts the token at position ``s + 1 + i``, from i = 1 on.
    """
    config, device = model.config, tokens.device
    weight = model.model.embed_tokens.weight
    lead = lead_rows(config.block_drafts)
    offset = torch.arange(masks + lead, device=device) + (not config.block_drafts)
    positions = (starts[..., None] + offset).flatten()
    x = adapter.mask.to(weight.dtype).expand(*starts.shape, masks + lead, -1)
    if lead:
        copies = F.embedding(tokens.gather(1, starts), weight)
        x = torch.cat([copies[:, :, None], x[:, :, 1:]], 2)
    seen = starts - 1 if lead else starts
    grouped = group_attention(config, seen, masks + lead, clean.keys, clean.values)
    scale = query_scale_of(config, positions, weight.dtype)
    attend = grouped if scale is None else lambda layer, q, k, v: grouped(layer, q * scale, k, v)
    rope = rope_of(config, positions, weight.dtype)
    x = x.flatten(0, 2)

    def through(number: int, x: Tensor) -> Tensor:
        with adapter.attached(number):
            out: Tensor = model.model.layers[number](x, rope, attend)
        return out

    for number in range(config.layers):
        if by_layer and torch.is_grad_enabled():
            x = checkpoint(through, number, x, use_reentrant=False)
        else:
            x = through(number, x)
    return model.model.norm(x).unflatten(0, (*starts.shape, -1))[:, :, lead:]
