"""The trainer's attention: dense, with any mask."""

from __future__ import annotations

from torch import Tensor

from lopa_dist.models.config import ModelConfig
from lopa_dist.models.transformer import Attend


def dense(config: ModelConfig, hidden: Tensor) -> Attend:
    """Return attention with the mask `hidden` [B, L, L], which is True where a row (dim 1) does not see a key (dim 2).

    The attention consists of separate products. For sequences as short as these, the compiled products are several
    times as fast on a CPU as the backward pass of fused attention.
    """
    rows, length, _ = hidden.shape
    group = config.heads // config.kv_heads
    bias = hidden.float().mul(-1e9)[:, None, None]  # [B, 1, 1, L, L]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q.view(rows, length, config.kv_heads, group, -1).permute(0, 2, 3, 1, 4)
        k, v = (x.view(rows, length, config.kv_heads, -1).transpose(1, 2) for x in (k, v))
        scores = (q.flatten(2, 3) * config.head_dim**-0.5) @ k.transpose(2, 3)
        share = (scores.view(rows, config.kv_heads, group, length, length) + bias).softmax(-1).to(v.dtype)
        mixed = (share.flatten(2, 3) @ v).view(rows, config.kv_heads, group, length, -1)
        return mixed.permute(0, 3, 1, 2, 4).reshape(rows * length, config.heads, -1)

    return attend
