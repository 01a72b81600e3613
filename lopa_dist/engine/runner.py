"""One forward: a laid-out batch in, records out; K/V written on the way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lopa_dist.decode.layout import ROW_TILE, Batch
from lopa_dist.engine.kv_pool import KVPool
from lopa_dist.kernels.attention import Attention
from lopa_dist.kernels.record_head import Sampling, record_head
from lopa_dist.kernels.segment_attention import Segments
from lopa_dist.models.tensor_parallel import head_shard
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Communicator, Solo
from lopa_dist.ragged import Ints, send


@dataclass
class Prepared:
    """A batch and what its attention needs: the host's part of a forward."""

    batch: Batch
    slots: Ints | None  # of the sequences in the batch; null where they are all there are
    segments: Segments
    plan: Any  # what the attention's back end made of the segments

    def slot(self, sequence: Ints) -> Ints:
        """The slots of the batch's sequences."""
        return sequence if self.slots is None else self.slots[sequence]


class Runner:
    """Eager path: the model's modules, and an attention back end."""

    def __init__(
        self,
        model: Transformer,
        pool: KVPool,
        sampling: Sampling,
        attention: Attention,
        tensor: Communicator | None = None,
    ) -> None:
        self.model, self.pool, self.sampling, self.attention = model, pool, sampling, attention
        self.shard = head_shard(tensor or Solo())
        self.own: dict[int, Sampling] = {}  # by slot, for requests that bring their own
        # hidden states of leads' last rows: they predict the first token behind a prompt
        self.kept = model.head_weight.new_zeros(pool.most_leads, model.config.hidden_size)

    def prepare(self, batch: Batch, slots: Ints | None = None) -> Prepared:
        """Find the batch's K/V in the pool; `slots` are its sequences' where some wait."""
        self.pool.reserve(len(batch.tokens))
        segments = self.segments(batch, slots)
        return Prepared(batch, slots, segments, self.attention.plan(segments, len(batch.tokens)))

    def segments(self, batch: Batch, slots: Ints | None) -> Segments:
        """The batch's segments with the pool's addresses."""
        pool = self.pool
        sequence = batch.sequence if slots is None else slots[batch.sequence]
        prompts = batch.prompts
        rows = (prompts.lead_row[batch.sequence], prompts.rest_row[batch.sequence]) if prompts else None
        base, shared, tail = pool.views(sequence, batch.shared, rows)
        if batch.tail is not None:  # with a dual cache nothing is shared
            tail = base + batch.tail[0], batch.tail[1]
        return Segments(batch.start, batch.rows, base, shared, pool.scratch + batch.start, batch.hi, tail)

    @torch.inference_mode()
    def forward(self, prepared: Prepared) -> Tensor:
        """Records of this rank's branches, ``[local_branches, masked, 3]`` int32; zeros where none was asked for."""
        batch, pool = prepared.batch, self.pool
        records = torch.zeros(batch.local_branches * batch.masked, 3, dtype=torch.int32, device=batch.tokens.device)
        shape = (batch.local_branches, batch.masked, 3)
        if not len(batch.rows):
            return records.view(shape)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            pool.write(layer, k, v)
            return self.attention.attend(q, pool.keys[layer], pool.values[layer], prepared.plan)

        rows, last = batch.head_rows, self.last_rows(batch)
        wanted = rows.clamp(min=0)
        if last is not None:
            wanted = torch.cat([wanted, last[0]])
        hidden = self.model(batch.tokens, batch.positions, attend, F.pad(wanted, (0, -len(wanted) % ROW_TILE)))
        head = hidden[: len(rows)]
        if last is not None:
            self.kept[last[1]] = hidden[len(rows) : len(wanted)]
        if batch.prompts and batch.prompts.recalls:
            head = torch.where((rows < 0)[:, None], self.kept[rows.clamp(max=-1)], head)
        self.write_records(prepared, head, records)
        return records.view(shape)

    def last_rows(self, batch: Batch) -> Tensor | None:
        """Last rows of the leads that this forward computes, and the places in `kept` where their hidden states stay.

        ``[2, leads]``; null where it computes none.
        """
        if not batch.prompts or not batch.prompts.keep:
            return None
        return send(np.stack(batch.prompts.keep), batch.tokens.device)

    def write_records(self, prepared: Prepared, hidden: Tensor, records: Tensor) -> None:
        """Records of the head rows' hidden states ``[H, d]`` into their places, each by its request's sampling."""
        batch, weight, mask_id = prepared.batch, self.model.head_weight, self.model.config.mask_id
        for sampling, rows in self.by_sampling(prepared):
            keys = None if batch.head_keys is None else batch.head_keys[rows]
            records[batch.head_slots[rows]] = record_head(hidden[rows], weight, mask_id, keys, sampling, self.shard)

    def by_sampling(self, prepared: Prepared) -> Iterator[tuple[Sampling, Tensor | slice]]:
        """Head rows by how their requests choose tokens: one kind, unless requests in flight bring their own."""
        if not self.own:
            yield self.sampling, slice(None)
            return
        kinds = [self.sampling, *dict.fromkeys(self.own.values())]
        kind_of = np.zeros(len(self.pool.bases), int)
        for slot, sampling in self.own.items():
            kind_of[slot] = kinds.index(sampling)
        found = kind_of[prepared.slot(prepared.batch.head_sequence)]
        for kind, sampling in enumerate(kinds):
            rows = np.nonzero(found == kind)[0]
            if len(rows):
                yield sampling, send(rows, prepared.batch.tokens.device)
