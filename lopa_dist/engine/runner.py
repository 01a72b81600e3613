"""One forward: a laid-out batch in, records out; K/V written on the way."""

from __future__ import annotations

import torch
from torch import Tensor

from lopa_dist.decode.layout import Batch
from lopa_dist.engine.kv_pool import KVPool
from lopa_dist.kernels.record_head import Sampling, record_head
from lopa_dist.kernels.segment_attention import Segments, attend_grouped, attend_plain, plan
from lopa_dist.models.transformer import Transformer


class Runner:
    """Eager path. `attention` is ``torch`` (grouped by shape) or ``plain`` (the oracle)."""

    def __init__(self, model: Transformer, pool: KVPool, sampling: Sampling, attention: str = "torch") -> None:
        self.model, self.pool, self.sampling, self.attention = model, pool, sampling, attention

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Records of this rank's branches, ``[local_branches, masked, 3]`` int32; zeros where none was asked for."""
        config, pool = self.model.config, self.pool
        records = torch.zeros(batch.local_branches * batch.masked, 3, dtype=torch.int32, device=batch.tokens.device)
        shape = (batch.local_branches, batch.masked, 3)
        if not len(batch.rows):
            return records.view(shape)
        pool.reserve(len(batch.tokens))
        own = pool.scratch + batch.start
        segments = Segments(batch.start, batch.rows, pool.base(batch.sequence), batch.shared, own, batch.hi)
        groups = plan(segments, config.heads // config.kv_heads, batch.tokens.device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            pool.write(layer, k, v)
            keys, values = pool.keys[layer], pool.values[layer]
            if self.attention == "plain":
                return attend_plain(q, keys, values, segments)
            return attend_grouped(q, keys, values, groups)

        hidden = self.model(batch.tokens, batch.positions, attend)[batch.head_rows]
        found = record_head(hidden, self.model.head_weight, config.mask_id, batch.head_keys, self.sampling)
        records[batch.head_slots] = found
        return records.view(shape)
