"""One forward: a laid-out batch goes in, records come out, and K/V are written on the way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lopa_dist.decode.config import record_size
from lopa_dist.engine.kv_pool import KVPool
from lopa_dist.engine.memory import short_of_memory
from lopa_dist.kernels.attention import AttentionKernel, Native
from lopa_dist.kernels.dispatch import by_torch, in_c, on_device
from lopa_dist.kernels.record_head import record_head
from lopa_dist.kernels.sampling import Sampling
from lopa_dist.kernels.segment_attention import Segments
from lopa_dist.models.fused import AttendCached, Cache, FusedTransformer
from lopa_dist.models.native_layers import NativeLayers
from lopa_dist.models.tensor_parallel import head_shard
from lopa_dist.models.transformer import Transformer, rope_of
from lopa_dist.parallel.communicator import Communicator
from lopa_dist.ragged import Ints, padded
from lopa_dist.rows.forward_batch import ForwardBatch
from lopa_dist.staging import to_device


@dataclass
class Prepared:
    """A batch and what its attention needs: the host's part of a forward."""

    batch: ForwardBatch
    slots: Ints | None  # of the batch's sequences; None: all
    plan: Any  # of attention's back end, for the batch's segments
    must_be_finite: Tensor | None  # [R'] bool, see `kernels.rope.without_overflow`; None: no row can overflow
    kv_slots: Tensor | None = None  # [R'] where rows' K/V go; None: into scratch, in packed order

    def slot(self, sequence: Ints) -> Ints:
        """Return the slots of sequences, given by their numbers in the batch."""
        return sequence if self.slots is None else self.slots[sequence]


@dataclass(frozen=True)
class Running:
    """What a runner runs, and how."""

    model: Transformer
    network: FusedTransformer  # the model's layers
    attention: AttentionKernel
    sampling: Sampling  # of requests that do not have their own
    longest: int  # the most tokens of a sequence, its prompt included
    tensor: Communicator  # the group that the model is split over
    plain: frozenset[str]  # kernels that run in torch's form
    second_choices: bool  # whether records have a second choice


class Runner:
    """Eager path: any model on any device, with any attention back end."""

    def __init__(self, running: Running, pool: KVPool) -> None:
        self.model, self.network, self.attention = running.model, running.network, running.attention
        self.pool, self.sampling, self.plain = pool, running.sampling, running.plain
        self.second_choices, self.record_size = running.second_choices, record_size(running.second_choices)
        weight, config = self.model.head_weight, self.model.config
        self.device = weight.device
        # looking up a position's cosines and sines takes two operations, computing them a dozen
        self.rotations = rope_of(config, torch.arange(running.longest, device=self.device), weight.dtype)
        self.may_overflow = pool.keys.dtype == torch.float16
        whole = isinstance(self.attention, Native) and NativeLayers.suits(self.network, self.rotations)
        self.whole = NativeLayers(self.network, self.rotations) if whole else None  # all layers in one call
        self.shard = head_shard(running.tensor)
        self.request_sampling: dict[int, Sampling] = {}  # by slot, of requests with their own
        # hidden states of shared prefixes' last rows, which predict the first token after a prompt
        self.prefix_hidden = weight.new_zeros(pool.most_prefixes, config.hidden_size)

    def prepare(self, batch: ForwardBatch, slots: Ints | None = None) -> Prepared:
        """Return the batch with its K/V's places and its attention plan; `slots`: its sequences' slots, None: all."""
        self.pool.reserve(len(batch.tokens))
        plan = self.attention.plan(self.segments(batch, slots), len(batch.tokens))
        must_be_finite = batch.must_be_finite() if self.may_overflow else None
        return Prepared(batch, slots, plan, must_be_finite, self.kv_slots(batch, slots))

    def kv_slots(self, batch: ForwardBatch, slots: Ints | None) -> Tensor | None:
        """Return where in the pool the rows' K/V go (`Prepared.kv_slots`)."""
        table = batch.table
        if table.place is None:
            return None
        sequence = (table.sequence if slots is None else slots[table.sequence]).repeat(table.rows)
        at = self.pool.scratch + np.arange(len(batch.tokens))
        own = np.flatnonzero(table.place >= 0)
        at[own] = self.pool.slots(sequence[own], table.place[own])
        return to_device(at, self.device)

    def segments(self, batch: ForwardBatch, slots: Ints | None) -> Segments:
        """Return the batch's segments with the pool's addresses."""
        pool, table, prefill = self.pool, batch.table, batch.prefill
        sequence = table.sequence if slots is None else slots[table.sequence]
        rows = None
        if prefill and table.place is None:  # K/V of prompts' rows are in scratch
            rows = prefill.prefix_row[table.sequence], prefill.suffix_row[table.sequence]
        base, shared, tail = pool.key_ranges(sequence, table.shared, rows)
        if table.tail is not None:  # with a dual cache no prefix is shared
            tail = base + table.tail[0], table.tail[1]
        own = pool.scratch + table.start
        drafts = None if batch.drafts is None else (table.depth, batch.drafts.until)
        return Segments(table.start, table.rows, base, shared, own, table.hi, tail, table.seen, drafts)

    def warm_up(self) -> None:
        """Prepare what takes long before the first step. This runner has nothing to prepare."""

    @torch.inference_mode()
    def forward(self, prepared: Prepared) -> Tensor:
        """Return this rank's records ``[branches, columns, 3 or 5]`` int32; zeros where none is wanted."""
        try:
            # Triton launches kernels on the current device, wherever their tensors are
            with by_torch(self.plain), on_device(self.device):
                return self.run(prepared)
        except torch.OutOfMemoryError as error:
            raise short_of_memory(error) from error

    def run(self, prepared: Prepared) -> Tensor:
        """Return what `forward` does, on the current device."""
        batch, pool = prepared.batch, self.pool
        records = batch.heads.no_records(self.record_size)
        if not len(batch.table.rows):
            return records

        rows, last = batch.heads.predictions.rows, self.last_rows(batch)
        wanted = rows.clamp(min=0)
        if last is not None:
            wanted = torch.cat([wanted, last[0]])
        tokens, positions, slots = batch.tokens, batch.positions, prepared.kv_slots
        if in_c(self.network.head) and not self.network.needs_tiles:
            count = len(batch.table.hi)
            tokens, positions, slots = tokens[:count], positions[:count], slots if slots is None else slots[:count]
        else:
            wanted = F.pad(wanted, (0, padded(len(wanted)) - len(wanted)))
        cache = Cache(pool.keys, pool.values, pool.scratch, prepared.must_be_finite, slots)
        if self.whole and self.whole.runs(cache):
            hidden = self.whole(tokens, positions, cache, prepared.plan, wanted)
        else:
            hidden = self.network(tokens, positions, None, cache, self.attend(prepared), wanted, self.rope(positions))
        head = hidden[: len(rows)]
        if last is not None:
            self.prefix_hidden[last[1]] = hidden[len(rows) : len(rows) + last.shape[1]]
        if batch.prefill and batch.prefill.reads_stored:
            head = torch.where((rows < 0)[:, None], self.prefix_hidden[rows.clamp(max=-1)], head)
        self.write_records(prepared, head, records.flatten(0, 1))
        return records

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of positions ``[R]``, as `rope_of` does."""
        cos, sin = self.rotations
        return cos.index_select(0, positions), sin.index_select(0, positions)

    def attend(self, prepared: Prepared) -> AttendCached:
        """Return the function that attends in a forward."""
        keys, values, plan = self.pool.keys.unbind(), self.pool.values.unbind(), prepared.plan
        return lambda layer, q: self.attention.attend(q, keys[layer], values[layer], plan)

    def last_rows(self, batch: ForwardBatch) -> Tensor | None:
        """Return the last rows of the shared prefixes that this forward computes, and their slots in `prefix_hidden`.

        ``[2, prefixes]``; None if it computes none.
        """
        if not batch.prefill or not batch.prefill.hidden_to_store:
            return None
        return to_device(np.stack(batch.prefill.hidden_to_store), batch.tokens.device)

    def write_records(self, prepared: Prepared, hidden: Tensor, records: Tensor) -> None:
        """Write the records of the head rows' hidden states ``[H, d]``, each with its request's sampling."""
        batch, weight, mask_id = prepared.batch, self.network.head, self.model.config.mask_id
        all_keys = batch.heads.predictions.keys
        for sampling, rows in self.by_sampling(prepared):
            keys = None if all_keys is None else all_keys[rows]
            found = record_head(hidden[rows], weight, mask_id, keys, sampling, self.shard, None, self.second_choices)
            records.index_copy_(0, batch.heads.slots[rows], found)

    def by_sampling(self, prepared: Prepared) -> Iterator[tuple[Sampling, Tensor | slice]]:
        """Yield head rows grouped by their requests' sampling: all at once, unless some request has its own."""
        if not self.request_sampling:
            yield self.sampling, slice(None)
            return
        kinds = [self.sampling, *dict.fromkeys(self.request_sampling.values())]
        kind_of = np.zeros(len(self.pool.base), int)
        for slot, sampling in self.request_sampling.items():
            kind_of[slot] = kinds.index(sampling)
        found = kind_of[prepared.slot(prepared.batch.heads.sequence)]
        for kind, sampling in enumerate(kinds):
            rows = np.nonzero(found == kind)[0]
            if len(rows):
                yield sampling, to_device(rows, prepared.batch.tokens.device)
