"""What rows see in training: clean rows see the tokens before them; masks see constant K/V and their own group."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lopa_dist.models.config import ModelConfig
from lopa_dist.models.transformer import Attend

UNSEEN = -1e9


def clean_attention(rows: int, keys: list[Tensor], values: list[Tensor]) -> Attend:
    """Return causal attention over `rows` texts side by side, which appends their K/V, ``[B, Hkv, T, D]`` per layer."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (rows, -1)).transpose(1, 2) for x in (q, k, v))
        keys.append(k)
        values.append(v)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return mixed.transpose(1, 2).flatten(0, 1)

    return attend


def group_attention(config: ModelConfig, starts: Tensor, rows: int, keys: list[Tensor], values: list[Tensor]) -> Attend:
    """Return attention of groups over the tokens before them, whose K/V are constants, and over themselves.

    Both parts are computed explicitly and share one softmax: the tokens' K/V have no gradients, and a group is too
    short to gain from a kernel.

    Args:
        config: the model's.
        starts: ``[B, G]`` the last position that each group sees.
        rows: rows per group.
        keys, values: ``[B, Hkv, T, D]`` per layer.
    """
    count, groups = starts.shape
    heads, shared = keys[0].shape[1], config.heads // config.kv_heads  # on a tensor rank, its own heads
    place = torch.arange(keys[0].shape[2], device=starts.device)
    unseen = torch.zeros(count, groups, 1, len(place), device=starts.device)
    unseen.masked_fill_((place > starts[..., None])[:, :, None], UNSEEN)
    bias = unseen.expand(-1, -1, rows, -1).reshape(count, 1, 1, groups * rows, -1)
    own = torch.zeros(rows, rows, device=starts.device)
    if not config.block_drafts:
        own = torch.full_like(own, UNSEEN).triu_(1)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # a K/V head serves several query heads: [B, Hkv, h, G n, D] and [B, Hkv, 1, T, D]
        q = (q * config.head_dim**-0.5).view(count, groups * rows, heads, shared, -1).permute(0, 2, 3, 1, 4)
        cached_k, cached_v = keys[layer].to(q.dtype), values[layer].to(q.dtype)
        before = (q.flatten(2, 3) @ cached_k.transpose(2, 3)).unflatten(2, (shared, -1)) + bias.to(q.dtype)
        k, v = (x.view(count, groups, rows, heads, 1, -1).permute(0, 3, 4, 1, 2, 5) for x in (k, v))
        grouped = q.unflatten(3, (groups, rows))  # [B, Hkv, h, G, n, D]
        among = (grouped @ k.transpose(-1, -2) + own.to(q.dtype)).flatten(3, 4)  # [B, Hkv, h, G n, n]
        share = torch.cat([before, among], -1).softmax(-1).to(v.dtype)
        seen, group = share.split([before.shape[-1], rows], -1)
        mixed = (seen.flatten(2, 3) @ cached_v).unflatten(2, (shared, -1))
        mixed = mixed + (group.unflatten(3, (groups, rows)) @ v).flatten(3, 4)
        return mixed.permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(1, 2)

    return attend
